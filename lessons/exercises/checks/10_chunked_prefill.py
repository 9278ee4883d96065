"""Check the part of exercise 10 that needs nothing but Python: a page runs these checks, too."""

import math
from functools import lru_cache, partial
from pathlib import Path

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.chunked_prefill.learner_policy import learner_policy
from minivllm_lab.predict.workload import configs, recorded, Replay

RECORDED = Path(__file__).parents[3] / "tests" / "conformance" / "data"


def _capped(module):
    return learner_policy(module.chunk_limit, module.running_tokens, module.admitted_tokens)


def _number(found, what):
    assert isinstance(found, int), f"{what} is {found!r}, not a whole number"
    return found


# ---- on paper --------------------------------------------------------------------------------------------------------


def check_prediction(module):
    """Steps 1 to 4 of A, B and C are what the engine's scheduler decides."""
    arrivals = {0: [("A", 14, 3)], 1: [("B", 9, 2), ("C", 2, 4)]}
    limits = SchedulerConfig(max_model_len=64, max_num_batched_tokens=10, long_prefill_token_threshold=5)
    scheduler, expected = Scheduler(limits, CacheConfig(num_gpu_blocks=99, enable_prefix_caching=False)), []
    for step in range(4):
        for name, prompt, output in arrivals.get(step, ()):
            scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
        decided, live = scheduler.schedule(), scheduler.requests
        expected.append(dict(decided.num_scheduled_tokens))
        done = [name for name in expected[-1] if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in done}))
    found = module.first_steps()
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert len(found) == 4, f"{len(found)} steps, not 4"
    for number, (one, other) in enumerate(zip(found, expected), start=1):
        assert list(one.items()) == list(other.items()), f"step {number} is not {one}; go through it again from step 1"


# ---- the caps --------------------------------------------------------------------------------------------------------


def _limits(module, expected, hints=()):
    for arguments, right in expected:
        found = _number(module.chunk_limit(*arguments), f"chunk_limit{arguments}")
        hint = next((words for value, words in hints if value(arguments) == found), "")
        assert found == right, f"chunk_limit{arguments} is {found}, and {right} is right{hint}"


def check_the_threshold_limits(module):
    """With other requests, one gets the threshold at most; without a threshold, the whole budget."""
    cases = (((8192, 512, 3), 512), ((64, 5, 2), 5), ((65_536, 0, 7), 65_536), ((1, 0, 1), 1), ((16, 1, 200), 1))
    _limits(module, cases, [(lambda a: 0, ": 0 means no threshold"), (lambda a: a[0] // a[2], ": it is not adaptive")])


def check_a_lone_request_has_the_whole_budget(module):
    """Without other requests the threshold is off; one more, running or waiting, turns it on."""
    cases = (((8192, 512, 1), 8192), ((12, 5, 1), 12), ((12, 5, 2), 5), ((12, 0, 1), 12), ((12, 3, 1, True), 12))
    _limits(module, cases, [(lambda a: a[1], ": it starves nobody, so nothing is gained")])


def check_an_adaptive_limit_is_a_fair_share_at_least(module):
    """An adaptive limit is an equal share of the budget if that is more than the threshold."""
    cases = (
        ((8192, 512, 4, True), 2048),
        ((8192, 512, 100, True), 512),
        ((12, 4, 2, True), 6),
        ((12, 4, 3, True), 4),
        ((13, 2, 4, True), 3),
        ((12, 0, 3, True), 12),
        ((8192, 512, 4, False), 512),
    )
    hints = [
        (lambda a: min(a[1], a[0] // a[2]), ": it raises the limit, and never lowers it"),
        (lambda a: a[0] // a[2], ": where no threshold is set there is nothing to adapt"),
    ]
    _limits(module, cases, hints)


def check_running_requests_get_what_is_left(module):
    """A running request gets what it lacks, up to the limit and the rest of the budget."""
    for arguments, right in (
        ((1000, 512, 8192), 512), ((1000, 512, 300), 300), ((200, 512, 300), 200), ((1, 512, 8), 1), ((7, 5, 0), 0),
        ((9, 9, 9), 9), ((1, 5, 0), 0), ((100_000, 20_000, 30_000), 20_000),
    ):  # fmt: skip
        found = _number(module.running_tokens(*arguments), f"running_tokens{arguments}")
        assert found == right, f"running_tokens{arguments} is {found}, and {right} is right"


def check_a_waiting_prompt_is_cut(module):
    """The head of the queue gets what it lacks, up to the limit and the rest of the budget."""
    for arguments, right in (
        ((1000, 512, 300), 300), ((1000, 512, 512), 512), ((1000, 5000, 300), 300), ((20, 512, 300), 20),
        ((5, 1, 9), 1),
    ):  # fmt: skip
        found = _number(module.admitted_tokens(*arguments), f"admitted_tokens{arguments}")
        assert found == right, f"admitted_tokens{arguments} is {found}, and {right} is right"


def check_without_chunked_prefill_the_budget_cuts_nobody(module):
    """A prompt that may not be cut waits for a step with room for what it wants, which the limit still caps."""
    for arguments, right, hint in (
        ((1000, 2048, 300, False), 0, ": 300 are left, so it would be cut"),
        ((1000, 2048, 1000, False), 1000, ": it fits exactly"),
        ((1000, 2048, 999, False), 0, ""),
        ((20, 2048, 300, False), 20, ""),
        ((1000, 512, 512, False), 512, ": under the limit it wants 512, and these fit"),
        ((1000, 512, 600, False), 512, ": under the limit it wants 512, and these fit"),
        ((1000, 512, 511, False), 0, ": under the limit it wants 512, and 511 are left"),
        ((1000, 2048, 300, True), 300, ": it may be cut"),
    ):
        found = _number(module.admitted_tokens(*arguments), f"admitted_tokens{arguments}")
        assert found == right, f"admitted_tokens{arguments} is {found}, and {right} is right{hint}"


# ---- what it costs ---------------------------------------------------------------------------------------------------


def check_steps_of_a_prompt(module):
    """A prompt takes what decodes leave of each step; if they leave nothing, it is never computed."""
    for arguments, right in (
        ((1000, 256, 56), 5), ((1000, 1000, 0), 1), ((1001, 1000, 0), 2), ((8, 9, 8), 8), ((1, 256, 255), 1),
        ((1, 64, 64), math.inf), ((100, 64, 70), math.inf), ((100_000, 16_384, 0), 7), ((100_001, 100_000, 0), 2),
    ):  # fmt: skip
        found = module.steps_of_a_prompt(*arguments)
        whole = found == math.inf or isinstance(found, int)
        assert whole, f"steps_of_a_prompt{arguments} is {found!r}, not a whole number"
        assert found == right, f"steps_of_a_prompt{arguments} is {found}, and {right} is right"


def check_keys_read_again(module):
    """Each chunk reads all keys before it: c · N(N − 1)/2 in N whole chunks, and the last one may be smaller."""
    for prompt, chunk in ((8, 8), (8, 4), (10, 4), (9, 3), (1, 1), (5, 1), (1000, 64), (64, 1000)):
        right = sum(start for start in range(0, prompt, chunk))
        found = _number(module.keys_read_again(prompt, chunk), f"keys_read_again({prompt}, {chunk})")
        hint = ". The first read of a key does not count" if found == right + prompt else ""
        hint = ". A smaller last chunk reads the keys before it, too" if prompt % chunk and found < right else hint
        assert found == right, f"keys_read_again({prompt}, {chunk}) is {found}, and {right} is right{hint}"


def check_knee(module):
    """The knee is where a step's operations take as long as its bytes."""
    for flops, bandwidth, size, right in (
        (1000, 10, 2, 100), (989.4e12, 3.35e12, 2, 295.34), (312e12, 2.039e12, 2, 153.02),
        (312e12, 2.039e12, 0.5, 38.25), (100e9, 25e9, 4, 8),
    ):  # fmt: skip
        found = module.knee(flops, bandwidth, size)
        hint = ". A token costs two operations a parameter" if math.isclose(found, 2 * right, rel_tol=1e-3) else ""
        hint = ". Fewer bytes are read sooner" if size == 0.5 and found > right else hint
        assert math.isclose(found, right, rel_tol=1e-3), f"{found:.4g}, and {right:.4g} tokens are right{hint}"


def check_budget_for(module):
    """The largest budget in time; 0 where the weights alone take longer; the two times run side by side."""
    for arguments, right in (
        ((0.5, 10, 2, 1000, 100), 25), ((0.1, 10, 2, 1000, 100), 0), ((0.2, 10, 2, 1000, 100), 10),
        ((0.05, 8e9, 2, 900e12, 3e12), 2812), ((0.005, 8e9, 2, 900e12, 3e12), 0), ((0.01, 8e9, 2, 900e12, 3e12), 562),
        ((0.5, 10, 4, 996, 100), 24), ((0.3, 10, 4, 1000, 100), 0), ((0.06, 10, 0.5, 1000, 100), 3),
        ((0.5, 1e9, 2, 900e12, 3e12), 225_000), ((0.5, 10, 2, 10, 100), 0),
    ):  # fmt: skip
        found = _number(module.budget_for(*arguments), f"budget_for{arguments}")
        gap, parameters, size, flops, bandwidth = arguments
        summed = max(0, math.floor((gap - parameters * size / bandwidth) * flops / (2 * parameters)))
        hint = ". Reading and computing go on at the same time" if right and found == summed else ""
        assert found == right, f"budget_for{arguments} is {found}, and {right} is right{hint}"


# ---- in the engine ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _recorded():
    """Return (name, workload, trace) of every workload recorded from vLLM's scheduler, those with a threshold first."""
    return sorted(recorded(RECORDED), key=lambda one: not one[1]["config"]["long_prefill_token_threshold"])


def check_vllm_decided_the_same(module):
    """In all 12,718 steps of 74 workloads recorded from vLLM v0.33.0, your caps lead to what its scheduler decided."""
    for name, workload, trace in _recorded():
        served = Replay(workload, Scheduler(*configs(workload), _capped(module)))
        for step, right in enumerate(trace):
            served.arrive()
            row = served.run()
            config = workload["config"]
            sizes = f"budget {config['max_num_batched_tokens']}, threshold {config['long_prefill_token_threshold']}"
            cut = "" if config["enable_chunked_prefill"] else ", nothing may be cut"
            where = f"{name} ({sizes}{cut}), step {step}"
            assert row["scheduled"] == right["scheduled"], (
                f"{where}: {dict(row['scheduled'])}, and in vLLM {dict(right['scheduled'])}"
            )
