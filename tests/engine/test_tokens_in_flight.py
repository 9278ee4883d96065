"""Steps that end before their tokens reach the host give the same tokens, whenever those arrive."""

import random
import time

import numpy as np
import pytest
import torch
from patience import PATIENCE

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.scheduler_output import AsyncModelRunnerOutput, CachedRequestData, NewRequestData, SchedulerOutput
from minivllm.entrypoints.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.tokens_in_flight import HostCopy, TokensInFlight
from minivllm_lab.engines.inside import runner_of

SETTINGS = {"max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 24}


def engine(device="cpu", **options) -> LLM:
    return LLM(EMBEDDED_MODEL, device=device, dtype="float32", **{**SETTINGS, "async_scheduling": True, **options})


@pytest.fixture
def deferred(monkeypatch):
    """Collect deferred outputs. On a CPU they would arrive immediately; here a coin toss decides."""
    coin, seen = random.Random(0), []
    get_output = AsyncModelRunnerOutput.get_output

    def noted(self):
        seen.append(self)
        return get_output(self)

    monkeypatch.setattr(AsyncModelRunnerOutput, "get_output", noted)
    monkeypatch.setattr(HostCopy, "has_arrived", lambda self: coin.random() < 0.5)
    return seen


SEEN_BY_THE_HOST = ({"repetition_penalty": 1.3}, {"logprobs": 2}, {"min_tokens": 1})


def random_params(draw: random.Random, seed: int) -> SamplingParams:
    """Draw parameters, most of which the device can sample; the other requests are short, so that
    such steps are few.
    """
    chosen = {"seed": seed, "temperature": draw.choice([0.0, 0.0, 0.8, 1.2])}
    if draw.random() < 0.25:
        return SamplingParams(**chosen, **draw.choice(SEEN_BY_THE_HOST), max_tokens=draw.randint(1, 3))
    few_tokens = {"top_p": 0.8, "top_k": 20} if draw.random() < 0.2 else {}
    return SamplingParams(**chosen, **few_tokens, max_tokens=draw.randint(5, 24))


def random_requests(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 4000) for _ in range(draw.randint(1, 90))] for _ in range(draw.randint(4, 14))]
    return prompts, [random_params(draw, seed=index) for index in range(len(prompts))]


def answers(llm: LLM, prompts, params) -> list[tuple]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


def test_random_requests_get_the_same_tokens(deferred):
    """The requests are chunked, preempted, sampled and stopped, in steps that can be deferred and
    some that cannot.
    """
    plain, ahead = engine(async_scheduling=False), engine()
    runner_of(ahead).defers_tokens = True
    for seed in range(2):
        prompts, params = random_requests(seed)
        assert answers(ahead, prompts, params) == answers(plain, prompts, params), seed
    assert len(deferred) > 15


def one_row(tokens: int, req_id="a", finished=()) -> SchedulerOutput:
    request = NewRequestData(req_id, [1] * tokens, [1] * tokens, [1], 0, SamplingParams())
    return SchedulerOutput([request], CachedRequestData(), {req_id: tokens}, tokens, {}, set(), {*finished})


def test_a_token_that_arrives_late_is_not_given_to_the_rows_next_request():
    batch = InputBatch(1, 32, 16)
    in_flight = TokensInFlight(batch, torch.device("cpu"))
    batch.update(one_row(3))
    in_flight.append(np.array([0]), torch.tensor([77]), torch.tensor([1.0]))
    batch.update(one_row(8, "a", finished=["a"]))  # of the same name, even
    inputs = batch.prepare({"a": 8}, {})
    ids = torch.from_numpy(inputs.input_ids)
    in_flight.fill(ids, inputs)
    assert ids.tolist() == [1] * 8
    in_flight.settle(wait=True)
    assert batch.token_ids[0, :9].tolist() == [1] * 8 + [0]
    in_flight.append(np.array([0]), torch.tensor([88]), torch.tensor([1.0]))
    batch.num_computed_tokens[0] = 8
    inputs = batch.prepare({"a": 1}, {})
    ids = torch.from_numpy(inputs.input_ids)
    in_flight.fill(ids, inputs)
    assert ids.tolist() == [88]
    assert batch.token_ids[0, 8] == 0
    in_flight.settle(wait=True)
    assert batch.token_ids[0, 8] == 88


def test_a_reset_drops_what_is_in_flight_and_the_drafts():
    llm = engine()
    runner = runner_of(llm)
    runner.defers_tokens = True
    runner.execute_model(one_row(3))
    runner.draft_tokens_handler.put({"a": [1]})
    runner.reset()
    assert not runner.draft_tokens_handler.take()
    runner.execute_model(one_row(4))
    runner.tokens_in_flight.settle(wait=True)
    assert runner.batch.num_tokens[runner.batch.row_of["a"]] == 5


def test_a_cpu_defers_nothing():
    assert not runner_of(engine()).defers_tokens


def test_the_next_step_is_launched_before_a_steps_tokens_are_asked_for(monkeypatch):
    llm = engine()
    runner_of(llm).defers_tokens = True
    launched, ahead = [], []
    append, get_output = TokensInFlight.append, AsyncModelRunnerOutput.get_output
    monkeypatch.setattr(TokensInFlight, "append", lambda *step: launched.append(step) or append(*step))

    def late(self):
        until, wanted = time.monotonic() + PATIENCE, min(len(ahead) + 2, 12)
        while len(launched) < wanted and time.monotonic() < until:
            time.sleep(0.001)
        ahead.append(len(launched) - len(ahead))
        return get_output(self)

    monkeypatch.setattr(AsyncModelRunnerOutput, "get_output", late)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert ahead == [2] * 11 + [1]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"enable_lora": True}], ids=str)
def test_on_a_gpu_the_same_tokens(options):
    plain, ahead = engine("cuda", async_scheduling=False, **options), engine("cuda", **options)
    assert runner_of(ahead).defers_tokens
    assert not runner_of(plain).defers_tokens
    for seed in range(10):
        prompts, params = random_requests(seed)
        assert answers(ahead, prompts, params) == answers(plain, prompts, params), seed
