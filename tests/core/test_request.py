"""Test a request's own counts, how it ends, and what it refuses."""

import pytest
from refusals import assert_refused

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.request import Request, RequestStatus
from minivllm.core.stop import check_stop
from minivllm.sampling_params import SamplingParams


def test_the_callers_prompt_is_not_changed() -> None:
    prompt = [1, 2]
    Request("r", prompt, max_tokens=5).append_output_token_id(3)
    assert prompt == [1, 2]


def test_a_request_without_a_prompt_is_refused() -> None:
    assert_refused("is empty", Request, "r", [], max_tokens=1)


@pytest.mark.parametrize("status", list(RequestStatus))
def test_a_finished_status_and_only_that_has_a_reason(status: RequestStatus) -> None:
    assert status.is_finished == (status.name.startswith("FINISHED"))
    assert (status.finish_reason is not None) == status.is_finished


def stopped(token_id: int, max_model_len: int = 100, **arguments: object) -> tuple[str | None, int | None]:
    request = Request("r", [1, 2], **{"max_tokens": 10, **arguments})  # type: ignore[arg-type]
    request.append_output_token_id(token_id)
    assert check_stop(request, token_id, max_model_len) == request.status.is_finished
    return request.status.finish_reason, request.stop_reason


def test_what_stops_a_request() -> None:
    assert stopped(5) == (None, None)
    assert stopped(5, eos_token_ids=[4, 5]) == ("stop", None)
    assert stopped(5, stop_token_ids=[5]) == ("stop", 5)
    assert stopped(5, max_tokens=1) == ("length", None)
    assert stopped(5, max_model_len=3) == ("length", None)
    assert stopped(5, max_model_len=4) == (None, None)


def test_eos_comes_before_stop_tokens_and_both_before_length() -> None:
    assert stopped(5, eos_token_ids=[5], stop_token_ids=[5], max_tokens=1) == ("stop", None)
    assert stopped(5, stop_token_ids=[5], max_tokens=1) == ("stop", 5)


def test_ignored_eos_may_still_be_a_stop_token() -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True, stop_token_ids=[5])
    request = EngineCoreRequest("r", [1], params, (5,), 0.0).to_request()
    assert (request.eos_token_ids, request.stop_token_ids) == (frozenset(), frozenset({5}))
    assert stopped(5, stop_token_ids=[5]) == ("stop", 5)
