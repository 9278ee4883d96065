"""The runner's step by itself: what it passes through the model, what it refuses, and how it
recovers from any error.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from models.small import SMALL

from minivllm.config import CacheConfig, DraftingConfig, ModelConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import NonFiniteLogitsError
from minivllm.models.loader import random_model
from minivllm.sampling_params import SamplingParams
from minivllm.worker import model_runner
from minivllm.worker.model_runner import ModelRunner

CONFIG = ModelConfig.from_dict(SMALL | {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64})
MOST_STEPS = 40


def new_runner(drafts: int = 0) -> ModelRunner:
    speculation = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1} if drafts else None
    args = EngineArgs(max_num_seqs=4, max_model_len=64, block_size=4, speculative_config=speculation)
    settings = args.worker_settings(args.scheduler_config(CONFIG, None), "cpu", 1)
    runner = ModelRunner(random_model(CONFIG, seed=2), settings)
    runner.initialize_kv_cache(40)
    return runner


def new_scheduler(prompts: list[list[int]], drafts: int = 0, **sampling) -> Scheduler:
    drafting = DraftingConfig(num_speculative_tokens=drafts)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=9, drafting=drafting)
    scheduler = Scheduler(config, CacheConfig(num_gpu_blocks=40, block_size=4, enable_prefix_caching=False))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.5 * (index % 2), seed=index, max_tokens=9, ignore_eos=True, **sampling)
        scheduler.add_request(Request(f"request {index}", prompt, max_tokens=9, sampling_params=params))
    return scheduler


def tokens_of(runner: ModelRunner, scheduler: Scheduler) -> dict[str, list[int]]:
    """Run all requests to the end, drafts included; return their tokens."""
    tokens: dict[str, list[int]] = {}
    for _ in range(MOST_STEPS):
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        sampled = runner.execute_model(output)
        if sampled.nonfinite_req_ids:
            raise NonFiniteLogitsError(sampled.nonfinite_req_ids)
        for request_output in scheduler.update_from_output(output, sampled):
            tokens.setdefault(request_output.request_id, []).extend(request_output.new_token_ids)
        scheduler.update_draft_token_ids(runner.draft_tokens_handler.take())
    assert not scheduler.has_unfinished_requests()
    return tokens


@pytest.mark.parametrize(("value", "drafts"), [(math.nan, 2), (math.inf, 0), (-math.inf, 2)])
def test_logits_that_are_not_finite_are_refused_and_the_request_is_named(value, drafts):
    runner = new_runner(drafts)
    runner.model.embed_tokens.weight[21] = value
    prompts = [[1, 2, 3], [20, 21, 22], [4, 3, 4]]
    scheduler = new_scheduler(prompts, drafts)
    with pytest.raises(NonFiniteLogitsError, match=r"NaN or infinite logits for 1 requests \(request 1\)") as result:
        tokens_of(runner, scheduler)
    assert result.value.request_ids == ("request 1",)
    sound = new_runner()
    for item in (runner, sound):
        item.model.embed_tokens.weight[21] = 0.0
    runner.reset()
    again = tokens_of(runner, new_scheduler(prompts, drafts))
    assert again == tokens_of(sound, new_scheduler(prompts)), "nothing of the NaN is left in the cache"


def test_a_reset_forgets_the_prompts_and_the_step_in_progress():
    runner = new_runner()
    chunk = new_scheduler([[1, 2] * 6], prompt_logprobs=1).schedule()
    runner.execute_model(replace(chunk, has_structured_output_requests=True))
    assert runner.prompt_logprobs
    runner.reset()
    assert not runner.prompt_logprobs
    assert runner.execute_model_state is None


def set_one_logit(runner, value, monkeypatch):
    compute = runner.model.compute_logits

    def with_one(hidden):
        logits = compute(hidden)
        logits[-1, 7] = value
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", with_one)


@pytest.mark.parametrize(
    ("value", "is_refused"), [(math.nan, True), (math.inf, True), (-math.inf, False), (1e30, False)]
)
def test_one_logit_of_a_row_that_is_nan_or_infinite_is_refused(value, is_refused, monkeypatch):
    """Minus infinity only excludes its token, and a large logit wins."""
    runner = new_runner()
    set_one_logit(runner, value, monkeypatch)
    scheduler = new_scheduler([[5, 6]], logit_bias={8: 90.0})
    if is_refused:
        with pytest.raises(NonFiniteLogitsError, match="for 1 requests"):
            tokens_of(runner, scheduler)
    else:
        (tokens,) = tokens_of(runner, scheduler).values()
        assert (7 in tokens) == (value > 0)


def test_the_parts_of_a_step_have_names_in_the_profiler(monkeypatch):
    names = set()
    monkeypatch.setattr(model_runner, "record_function_or_nullcontext", lambda name: names.add(name) or nullcontext())
    tokens_of(new_runner(), new_scheduler([[1, 2, 3]]))
    assert {"minivllm::prepare", "minivllm::forward", "minivllm::sample", "minivllm::draft"} == names
