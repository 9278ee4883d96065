"""`async_scheduling` gives the same tokens in any combination, and a failed step ends no more
requests than it must.
"""

from dataclasses import replace

import pytest
from engine.mixed_requests import GREEDY, PROMPTS, WISHES, all_blocks_are_free, greedy_answers, run_out

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, ModelConfig, Parts
from minivllm.config.units import GIB
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.policy import SchedulingPolicy
from minivllm.engine.arg_utils import EngineArgs
from minivllm_lab.engines.inside import core_of

WISHES = [*WISHES]
WISHES[1] = replace(WISHES[1], logprobs=2)
WISHES[5] = SamplingParams(temperature=0.0, max_tokens=24, stop=["e", ")"])
SETTINGS = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 6, "block_size": 8}
OWN_STEPS = SchedulingPolicy(schedule=lambda scheduler, step: None)
OWN_VICTIM = SchedulingPolicy(victim=lambda running, policy, blocks: running[0])
NGRAM = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def answers(llm):
    """Return everything in the answers except floats, which differ in their last digits."""
    results = []
    for output in llm.generate(PROMPTS, WISHES, use_tqdm=False):
        results.append([entry and sorted(entry) for entry in output.prompt_logprobs or ()])
        for done in output.outputs:
            results.append((done.token_ids, done.text, done.finish_reason, done.stop_reason, len(done.logprobs or ())))
    return results


def drained(llm):
    """Run the remaining steps, which output nothing; return whether every block is free then."""
    return run_out(core_of(llm)) == [] and all_blocks_are_free(llm)


@pytest.fixture(scope="module")
def expected():
    return answers(LLM(EMBEDDED_MODEL, **SETTINGS))


COMBINATIONS = [
    {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 24},
    {"speculative_config": NGRAM, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 24},
    {"enable_prefix_caching": False, "scheduling_policy": "priority", "use_kv_cache": False},
]


@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_the_tokens_of_steps_one_by_one(expected, settings):
    llm = LLM(EMBEDDED_MODEL, **SETTINGS, **settings, async_scheduling=True)
    assert answers(llm) == expected
    assert drained(llm)
    if settings.get("enable_prefix_caching", True):
        assert answers(llm) == expected, "with whatever the first run has left in the prefix cache"
    stats = llm.llm_engine.stats
    assert ("num_gpu_blocks_override" in settings) == (stats.num_preemptions > 0)
    assert ("speculative_config" in settings) == (stats.spec_decoding_stats.num_accepted_tokens > 0)


@pytest.fixture(scope="module")
def llm():
    return LLM(EMBEDDED_MODEL, **SETTINGS, speculative_config=NGRAM, async_scheduling=True)


@pytest.fixture(scope="module")
def greedy_tokens(llm):
    return greedy_answers(llm, PROMPTS, 16)


def add_all(core):
    for index, prompt in enumerate(PROMPTS):
        core.add_request(EngineCoreRequest(str(index), prompt, replace(GREEDY, seed=0), (), 0.0))


def tokens_of(core):
    tokens, errors = {}, {}
    for output in run_out(core):
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if output.error:
            errors[output.request_id] = output.error
    return tokens, errors


def test_two_steps_are_in_flight_and_an_abort_drops_what_is_late(llm, greedy_tokens):
    core = core_of(llm)
    add_all(core)
    core.step()
    assert len(core.batch_queue) == 1, "the second, started before the first was waited for"
    core.abort_requests(["0", "3"])
    core.step()
    tokens, errors = tokens_of(core)
    assert not {"0", "3"} & set(tokens)
    assert tokens["6"] == greedy_tokens[6], "it had to wait for a place"
    assert not errors
    assert drained(llm)


@pytest.mark.parametrize("number", [0, 4])
def test_a_failed_step_ends_its_requests_and_the_one_behind_it_is_computed_again(
    llm, greedy_tokens, monkeypatch, number
):
    core, worker, calls = core_of(llm), core_of(llm).executor.worker, []

    def fails_once(scheduler_output):
        calls.append(scheduler_output)
        if len(calls) == 1 + number:
            monkeypatch.undo()
            raise RuntimeError("out of luck")
        return type(worker).execute_model(worker, scheduler_output)

    monkeypatch.setattr(worker, "execute_model", fails_once)
    add_all(core)
    for _ in range(number):
        core.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        core.step()
    assert not core.batch_queue
    tokens, errors = tokens_of(core)
    assert errors == dict.fromkeys(calls[number].num_scheduled_tokens, "RuntimeError: out of luck")
    assert {name: tokens[name] for name in tokens if name not in errors} == {"6": greedy_tokens[6]}
    assert drained(llm)


DEFAULTS = [
    ({}, None, False),
    ({}, 80 * GIB, True),
    ({"async_scheduling": False}, 80 * GIB, False),
    ({"async_scheduling": True}, None, True),
    ({"parts": Parts(policy=OWN_STEPS)}, 80 * GIB, False),
    ({"parts": Parts(policy=OWN_VICTIM)}, 80 * GIB, True),
]


@pytest.mark.parametrize(("settings", "gpu_memory", "ahead"), DEFAULTS)
def test_it_is_on_by_default_where_a_gpu_computes(settings, gpu_memory, ahead):
    args = EngineArgs(model=EMBEDDED_MODEL, **settings)
    config = args.scheduler_config(ModelConfig.from_pretrained(EMBEDDED_MODEL), gpu_memory)
    assert config.async_scheduling is ahead
    assert args.worker_settings(config, "cpu", 1).max_concurrent_batches == 1 + ahead
