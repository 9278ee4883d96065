"""Test which core gets a request: the rule is vLLM's."""

import pytest
from refusals import assert_refused

from minivllm import SamplingParams
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats, summed_stats
from minivllm.engine.load_balancing import LoadBalancer


def stats(waiting: int = 0, running: int = 0, usage: float = 0.0) -> SchedulerStats:
    return SchedulerStats(running, waiting, usage, PrefixCacheStats(requests=1), SpecDecodingStats(1, 2, 1, [1]), 1)


def request(**settings) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1, 2, 3], SamplingParams(), (0,), 0.0, **settings)


COUNTS = [
    ([(0, 5), (1, 0)], 1),  # four points for the one that waits, five for those that run
    ([(0, 4), (1, 0)], 0),  # equal: the first
    ([(2, 0), (1, 3), (0, 6)], 2),
    ([(0, 0), (0, 0)], 0),
]


@pytest.mark.parametrize(("counts", "chosen"), COUNTS)
def test_a_waiting_request_counts_as_four_that_run(counts, chosen):
    cores = LoadBalancer(len(counts))
    for rank, (waiting, running) in enumerate(counts):
        cores.observe(rank, stats(waiting, running), 0)
    assert cores.choose(request()) == chosen


def test_what_was_sent_counts_until_the_core_has_counted_it():
    cores = LoadBalancer(2)
    assert [cores.choose(request()) for _ in range(4)] == [0, 1, 0, 1]
    cores.observe(0, stats(running=1), num_received=1)  # of two: the second is still under way
    assert (cores.score(0), cores.score(1)) == (5, 8)
    cores.observe(0, stats(running=2), num_received=2)
    assert cores.score(0) == 2


def test_a_request_may_name_its_core():
    cores = LoadBalancer(2)
    assert [cores.choose(request(data_parallel_rank=1)) for _ in range(2)] == [1, 1]
    assert cores.choose(request()) == 0
    for wrong in (2, -1):
        assert_refused(rf"rank {wrong}: the cores are \[0, 1\]", cores.choose, request(data_parallel_rank=wrong))


def test_the_state_of_several_cores_as_one():
    assert summed_stats([stats(1, 2, 0.5)]) == stats(1, 2, 0.5)
    both = summed_stats([stats(1, 2, 0.5), stats(3, 4, 0.1)])
    assert (both.num_waiting_reqs, both.num_running_reqs, both.kv_cache_usage) == (4, 6, 0.3)
    assert both.prefix_cache_stats == PrefixCacheStats(requests=2)
    assert both.spec_decoding_stats == SpecDecodingStats(2, 4, 2, [2])
