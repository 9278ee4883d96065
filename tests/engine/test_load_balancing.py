"""Which core gets a request: vLLM's rule, and the prompt's beginning."""

import pytest

from minivllm import SamplingParams
from minivllm.core.limits import RequestLimits
from minivllm.core.messages import EngineCoreReady, EngineCoreRequest
from minivllm.core.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats, summed_stats
from minivllm.engine.load_balancing import PREFIX_SLACK, LoadBalancer
from minivllm.errors import MinivllmError


def stats(waiting: int = 0, running: int = 0, usage: float = 0.0) -> SchedulerStats:
    return SchedulerStats(running, waiting, usage, PrefixCacheStats(requests=1), SpecDecodingStats(1, 2, 1, [1]), 1)


def balancer(cores: int, routing: str = "load", blocks: int = 100) -> LoadBalancer:
    ready = EngineCoreReady(RequestLimits(512, 4, blocks - 1), blocks, None, stats())
    return LoadBalancer([ready] * cores, routing)


def request(prompt: list[int] | None = None, **settings) -> EngineCoreRequest:
    return EngineCoreRequest("r", prompt or [1, 2, 3], SamplingParams(), (0,), 0.0, **settings)


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ([(0, 5), (1, 0)], 1),  # four points for the one that waits, five for those that run
        ([(0, 4), (1, 0)], 0),  # equal: the first
        ([(2, 0), (1, 3), (0, 6)], 2),
        ([(0, 0), (0, 0)], 0),
    ],
)
def test_a_waiting_request_counts_as_four_that_run(counts, chosen):
    cores = balancer(len(counts))
    for rank, (waiting, running) in enumerate(counts):
        cores.observe(rank, stats(waiting, running), 0)
    assert cores.choose(request()) == chosen


def test_what_was_sent_counts_until_the_core_has_counted_it():
    cores = balancer(2)
    assert [cores.choose(request()) for _ in range(4)] == [0, 1, 0, 1]
    cores.observe(0, stats(running=1), num_received=1)  # of two: the second is still under way
    assert (cores.score(0), cores.score(1)) == (5, 8)
    cores.observe(0, stats(running=2), num_received=2)
    assert cores.score(0) == 2


def test_a_core_that_has_ended_gets_nothing_more():
    cores = balancer(2)
    cores.drop(0)
    assert {cores.choose(request()) for _ in range(5)} == {1}
    with pytest.raises(MinivllmError, match=r"running cores are \[1\]"):
        cores.choose(request(data_parallel_rank=0))
    with pytest.raises(MinivllmError, match="data_parallel_rank 2"):
        cores.choose(request(data_parallel_rank=2))
    assert cores.choose(request(data_parallel_rank=1)) == 1


SHARED = list(range(40))


def test_a_prompt_follows_its_beginning_unless_that_core_is_much_more_loaded():
    cores = balancer(2, "prefix")
    cores.observe(0, stats(running=1), 0)
    assert cores.choose(request([*SHARED, 1])) == 1
    cores.observe(1, stats(running=PREFIX_SLACK + 1), 1)
    assert cores.choose(request([*SHARED, 2])) == 1, "at the bound"
    assert cores.choose(request([*range(100, 140)])) == 0, "nobody has this one"
    cores.observe(1, stats(running=PREFIX_SLACK + 6), 2)
    assert cores.choose(request([*SHARED, 3])) == 0, "beyond the bound"


def test_load_alone_does_not_look_at_prompts():
    cores = balancer(2)
    assert [cores.choose(request(SHARED)) for _ in range(2)] == [0, 1]


def test_the_longest_beginning_wins_and_salts_keep_apart():
    cores = balancer(3, "prefix")
    cores.choose(request(SHARED[:8]))  # core 0: two blocks
    cores.observe(0, stats(running=PREFIX_SLACK), 1)
    assert cores.choose(request([*SHARED[:4], *[7] * 20])) == 0, "one block is more than none"
    cores.observe(0, stats(running=2), 2)
    cores.observe(1, stats(running=1), 0)
    assert cores.choose(request(SHARED, cache_salt="mine")) == 2
    assert cores.choose(request(SHARED)) == 0


def test_no_more_blocks_are_remembered_than_a_cache_holds_and_none_after_a_reset():
    cores = balancer(2, "prefix", blocks=10)
    assert cores.choose(request(SHARED)) == 0
    cores.observe(0, stats(running=1), 1)
    assert cores.choose(request(SHARED)) == 0
    cores.observe(0, stats(running=1), 2)
    cores.choose(request([*range(100, 140)], data_parallel_rank=0))
    cores.observe(0, stats(running=1), 3)
    assert cores.choose(request(SHARED)) == 1, "its blocks have been replaced"
    cores.observe(1, stats(running=2), 1)
    cores.forget_blocks()
    assert cores.choose(request(SHARED)) == 0


def test_the_state_of_several_cores_as_one():
    assert summed_stats([stats(1, 2, 0.5)]) == stats(1, 2, 0.5)
    both = summed_stats([stats(1, 2, 0.5), stats(3, 4, 0.1)])
    assert (both.num_waiting_reqs, both.num_running_reqs, both.kv_cache_usage) == (4, 6, 0.3)
    assert both.prefix_cache_stats == PrefixCacheStats(requests=2)
    assert both.spec_decoding_stats == SpecDecodingStats(2, 4, 2, [2])
    assert stats(1, 2, 0.5).idle() == stats()
