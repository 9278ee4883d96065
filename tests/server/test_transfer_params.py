"""`kv_transfer_params` between client and engine: accepted where there is a connector, passed to
one request, returned.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import assert_refused
from server.serving import Server

from minivllm.core.engine_messages import EngineCoreOutput, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.parallel_sampling import ParentRequest, child_requests
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
TOLD = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5601}


@pytest.mark.parametrize("params", [None, {}])
def test_a_server_without_a_connector_takes_none(base: Server, params: Any):
    body = {"prompt": "a", "max_tokens": 1, "kv_transfer_params": params}
    reply = base.client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["kv_transfer_params"]) == (200, None)


@pytest.mark.parametrize(("params", "words"), [(ASKED, "--kv-transfer-config"), ([1], "dict"), ("a", "dict")])
def test_and_refuses_all_else(base: Server, params: Any, words: str):
    reply = base.client.post("/v1/completions", json={"prompt": "a", "kv_transfer_params": params})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"].endswith("kv_transfer_params")
    assert words in error["message"]


def serving_with(**settings: Any) -> OpenAIServing:
    serving = OpenAIServing.__new__(OpenAIServing)
    serving.engine = SimpleNamespace(engine_args=EngineArgs(**settings))  # type: ignore[assignment]
    return serving


def test_a_second_tier_of_the_cache_reads_none_and_so_refuses_them():
    assert_refused("need a connector to other engines", serving_with(kv_offloading_size=0.1).check_transfer, ASKED, 1)


def test_with_a_connector_they_are_refused_for_several_prompts_or_where_no_message_can_carry_them():
    serving = serving_with(kv_transfer_config={"kv_connector": "TCPConnector"})
    serving.check_transfer(ASKED, 1)
    assert_refused("one prompt, and there are 2", serving.check_transfer, ASKED, 2)
    for value in ("\ud800", [2**64], {"b": -(2**63) - 1}):
        assert_refused("cannot be sent on", serving.check_transfer, {"a": value}, 1)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda params: CompletionRequest(prompt="a", **params),
        lambda params: ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **params),
    ],
)
def test_the_engine_is_told(request_of):
    told = request_of({"kv_transfer_params": ASKED}).to_sampling_params(4, {}, 100)
    assert told.extra_args == {"kv_transfer_params": ASKED}
    for nothing in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}):
        assert request_of(nothing).to_sampling_params(4, {}, 100).extra_args is None


def engine_request(n: int, kind: RequestOutputKind) -> EngineCoreRequest:
    params = SamplingParams(n=n, max_tokens=1, seed=1, output_kind=kind)
    return EngineCoreRequest("cmpl-a-0", [1, 2, 3], params, (0,), 0.0, kv_transfer_params=ASKED)


def test_of_n_completions_the_first_one_is_told():
    children = [*child_requests(engine_request(3, RequestOutputKind.FINAL_ONLY))]
    assert [child.kv_transfer_params for child in children] == [ASKED, None, None]


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_and_its_answer_is_the_requests(kind: RequestOutputKind, order: tuple[int, ...]):
    """The answer is right in whatever order the request's parts end."""
    processor, parent = OutputProcessor(None), ParentRequest("cmpl-a-0", 3)
    children = [*child_requests(engine_request(3, kind))]
    for index, child in enumerate(children):
        processor.add_request(child, None, index, parent)
    last: list[RequestOutput] = []
    for index in order:
        answer = TOLD if index == 0 else None
        output = EngineCoreOutput(children[index].request_id, [5], finish_reason="length", kv_transfer_params=answer)
        last, _ = processor.process_outputs([output])
    assert [(output.finished, output.kv_transfer_params) for output in last] == [(True, TOLD)]
