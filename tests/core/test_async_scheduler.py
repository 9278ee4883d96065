"""Schedule steps while others are in flight: what is sent ahead or held back, and what a late
output may do.

The behaviours are those of vLLM's `tests/v1/core/test_async_scheduler.py`: stop by max_tokens,
abort, preempt, prefix caching between prompts that arrive together, and between the turns of a
conversation. `test_random_workloads.py` has steps in flight, too.
"""

import pytest
from core.driving import Drive, make_scheduler
from core.worker_double import WorkerAhead

from minivllm.config import DraftingConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.request import RequestStatus


class Ahead(Drive):
    """Two steps in flight. A request's token at position i is 100 + i."""

    def __init__(self, **options) -> None:
        scheduler = make_scheduler(AsyncScheduler, **{"async_scheduling": True, **options})
        super().__init__(scheduler, WorkerAhead(4, lambda tokens: 100 + len(tokens)), depth=2)

    def begin(self) -> dict[str, int]:
        return self.schedule().num_scheduled_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_step_is_sent_beyond_max_tokens(max_tokens):
    ahead = Ahead()
    ahead.add("a", [1] * 5, max_tokens)
    ahead.add("b", [2] * 9, max_tokens + 1)
    assert ahead.finish() == 5 + max_tokens - 1 + 9 + max_tokens
    assert {name: len(tokens) for name, tokens in ahead.received.items()} == {"a": max_tokens, "b": max_tokens + 1}


def test_no_step_is_sent_beyond_max_model_len():
    ahead = Ahead(max_model_len=8)
    ahead.add("a", [1] * 5, 30)
    assert ahead.finish() == 7
    assert ahead.received == {"a": [105, 106, 107]}


def test_a_stop_token_is_noticed_one_step_late_and_what_came_after_it_is_dropped():
    ahead = Ahead()
    ahead.add("a", [1] * 5, 9, stop_token_ids=[106])
    assert ahead.finish() == 5 + 1 + 1, "the third step was on its way when the second's token ended the request"
    assert ahead.received == {"a": [105, 106]}


def test_the_late_output_of_an_aborted_request_is_dropped():
    ahead = Ahead()
    ahead.add("a", [1] * 5, 9)
    ahead.add("b", [2] * 5, 4)
    ahead.begin()
    ahead.begin()
    ahead.abort(["a"])
    ahead.finish()
    assert ahead.received == {"a": [], "b": [105, 106, 107, 108]}


def test_a_preempted_request_gets_its_late_token_once_and_waits_for_it():
    ahead = Ahead(num_gpu_blocks=6, enable_prefix_caching=False)
    ahead.add("a", [1] * 8, 9)
    victim = ahead.add("b", [2] * 8, 9)
    ahead.begin()
    assert ahead.begin() == {"a": 1}, "b has gone, for its block"
    assert (victim.status, victim.num_output_placeholders) == (RequestStatus.PREEMPTED, 1)
    ahead.abort(["a"])
    assert ahead.begin() == {}, "there is room, but its token is still to come"
    ahead.update()
    assert victim.all_token_ids[-1] == 108
    assert ahead.begin() == {"b": 9}
    ahead.finish()
    assert ahead.received["b"] == [*range(108, 117)]


def test_drafts_of_a_preempted_request_that_are_rejected_late_are_not_taken_back_again():
    ahead = Ahead(num_gpu_blocks=5, enable_prefix_caching=False, drafting=DraftingConfig(num_speculative_tokens=1))
    ahead.add("a", [1] * 6, 5)
    victim = ahead.add("b", [2] * 4, 5)
    assert [ahead.begin() for _ in range(3)] == [{"a": 6, "b": 4}, {"a": 2, "b": 2}, {"a": 2}]
    for _ in range(2):
        ahead.update()
    assert (victim.status, victim.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)


def test_a_late_token_may_end_a_preempted_request():
    ahead = Ahead(num_gpu_blocks=6, enable_prefix_caching=False)
    ahead.add("a", [1] * 8, 9)
    ahead.add("b", [2] * 8, 9, stop_token_ids=[108])
    ahead.begin()
    ahead.begin()
    assert [output.finish_reason for output in ahead.update()] == [None, "stop"]
    assert not ahead.scheduler.waiting


def test_prompts_that_arrive_together_share_their_blocks():
    ahead = Ahead()
    first, second = (ahead.add(name, [1] * 10, 4) for name in "ab")
    assert ahead.begin() == {"a": 10, "b": 2}
    ahead.finish()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_a_conversation_finds_its_last_turn():
    ahead = Ahead()
    ahead.add("a", [1] * 6, 7)
    ahead.finish()
    second = ahead.add("b", [1] * 6 + ahead.received["a"] + [7], 3)
    ahead.finish()
    assert second.num_cached_tokens == 12, "the last of its blocks was filled, and known to be, only as it ended"


def test_where_steps_go_through_stages_a_request_waits_for_its_token():
    ahead = Ahead(async_scheduling=False)
    ahead.add("a", [1] * 5, 9)
    assert [ahead.begin() for _ in range(2)] == [{"a": 5}, {}]
    ahead.add("b", [2] * 5, 9)
    assert ahead.begin() == {"b": 5}
    ahead.update()
    assert ahead.begin() == {"a": 1}
