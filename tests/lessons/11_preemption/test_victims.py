"""Rules for the preemption victim, and swap: who is preempted, what is recomputed, and that all
requests end.
"""

import itertools
import random

import pytest
from lessons.harness import engine_step

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_lab.preemption.victims import RULES, SwapSpace, victim_rule

BLOCK = 4


def scheduler_with(
    victim: str, blocks: int, swap: SwapSpace | None = None, policy: str = "fcfs", budget: int = 64
) -> Scheduler:
    config = SchedulerConfig(max_model_len=32, max_num_seqs=8, max_num_batched_tokens=budget, policy=policy)
    cache = CacheConfig(num_gpu_blocks=1 + blocks, block_size=BLOCK, enable_prefix_caching=False)
    rule = victim_rule(victim)
    return Scheduler(config, cache, swap.policy(rule) if swap else SchedulingPolicy(victim=rule))


def first_victim(victim: str, policy: str = "fcfs") -> str:
    """Return which of three requests is preempted first: a has the most tokens left, b the most
    blocks, c the fewest tokens left.
    """
    scheduler = scheduler_with(victim, 8, policy=policy)
    for name, prompt, answer, priority in (("a", 4, 24, 1), ("b", 14, 9, 2), ("c", 8, 6, 0)):
        scheduler.add_request(Request(name, [1] * prompt, max_tokens=answer, arrival_time=ord(name), priority=priority))
    for _ in range(20):
        if preempted := engine_step(scheduler).preempted_req_ids:
            return min(preempted)
    raise AssertionError("the pool was to be too small")


@pytest.mark.parametrize(
    ("victim", "name"),
    [("last in", "c"), ("first in", "a"), ("most blocks", "b"), ("fewest left", "c"), ("least computed", "a")],
)
def test_each_rule_takes_another(victim: str, name: str):
    assert set(RULES) == {"last in", "first in", "most blocks", "fewest left", "least computed"}
    assert first_victim(victim) == name


def test_without_a_rule_the_policy_decides():
    assert first_victim("") == "c"
    assert first_victim("", "priority") == "b"


def run(victim: str, swap: SwapSpace | None, seed: int, budget: int) -> tuple[Scheduler, list[Request], int, list[int]]:
    """Run random requests in a small pool; return scheduler, requests, computed tokens, blocks
    copied out and back.
    """
    draw = random.Random(seed)
    scheduler = scheduler_with(victim, 10, swap, budget=budget)
    requests = [Request(str(index), [1] * draw.randint(1, 12), max_tokens=draw.randint(1, 20)) for index in range(16)]
    for request in requests:
        scheduler.add_request(request)
    computed, copied = 0, [0, 0]
    for _ in range(4000):
        if not scheduler.has_unfinished_requests():
            break
        computed += engine_step(scheduler).total_num_scheduled_tokens
        now = swap.take_copied_blocks() if swap else (0, 0)
        copied = [copied[0] + now[0], copied[1] + now[1]]
    assert not scheduler.has_unfinished_requests(), "nobody waits for ever"
    assert scheduler.kv_cache_manager.usage == 0
    return scheduler, requests, computed, copied


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("victim", ["", *RULES])
def test_tokens_are_computed_once_and_again_only_if_lost(victim: str, swaps: bool):
    preempted = 0
    for seed, budget in itertools.product(range(5), (64, 8)):
        swap = SwapSpace(BLOCK) if swaps else None
        scheduler, requests, computed, copied = run(victim, swap, seed, budget)
        assert all(each.num_output_tokens == each.max_tokens for each in requests)
        useful = sum(each.num_tokens - 1 for each in requests)
        assert computed == useful + scheduler.num_recomputed_tokens
        preempted += scheduler.num_preemptions
        assert copied[0] == copied[1], "what goes out comes back"
        assert (copied[0] > 0) == (swaps and scheduler.num_preemptions > 0)
        assert swap is None or not swap.on_host
        assert scheduler.num_recomputed_tokens == 0 or not swaps
        assert scheduler.num_recomputed_tokens > 0 or swaps or not scheduler.num_preemptions
    assert preempted > 10


def test_a_swap_copies_the_blocks_of_what_was_computed():
    swap = SwapSpace(BLOCK)
    scheduler = scheduler_with("last in", 4, swap)
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 6, max_tokens=6))
    copied = []
    while scheduler.has_unfinished_requests():
        engine_step(scheduler)
        copied.append(swap.take_copied_blocks())
    # Both have 8 tokens in 2 blocks each when a needs a third one; b goes with 8 computed tokens.
    assert [each for each in copied if any(each)] == [(2, 0), (0, 2)]
