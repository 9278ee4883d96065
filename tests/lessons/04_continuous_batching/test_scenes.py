"""Scenes: the queue grows with time above capacity and not below it; a smaller budget shortens the
longest gap.
"""

import pytest
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm_lab.continuous_batching.scenes import arrivals_at, capacity, long_prompt
from minivllm_simulate.workloads import RequestLengths

CACHE = CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False)
COST = LinearCost(per_step=0.01, per_token=1e-4)


def test_the_capacity_is_what_full_slots_serve():
    """Four seats serve 21 tokens each: 20 steps of 10.4 ms from the first token to the last,
    ignoring others' prompts.
    """
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4)
    result = capacity([RequestLengths(1, 21)] * 40, config, CACHE, COST)
    assert result == pytest.approx(4 / (20 * 0.0104), rel=0.01)


def test_above_capacity_twice_the_requests_make_twice_the_queue():
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4)
    lengths = [RequestLengths(4, 10 + index % 20) for index in range(400)]
    rate = capacity(lengths, config, CACHE, COST)
    calm = [arrivals_at(0.7, lengths[:n], config, CACHE, COST, rate) for n in (200, 400)]
    over = [arrivals_at(1.4, lengths[:n], config, CACHE, COST, rate) for n in (200, 400)]
    assert max(load["longest_queue"] for load in calm) < 15
    assert over[1]["longest_queue"] == pytest.approx(2 * over[0]["longest_queue"], rel=0.35)
    assert over[1]["late_ttft"] > 1.5 * over[0]["late_ttft"] > 10 * calm[1]["late_ttft"]


def test_a_smaller_budget_shortens_the_longest_gap_and_the_prompt_waits_longer():
    results = [long_prompt(budget, CACHE, COST) for budget in (8192, 1024, 128)]
    gaps, waits = [result["longest_gap"] for result in results], [result["ttft"] for result in results]
    assert gaps == sorted(gaps, reverse=True)
    assert waits == sorted(waits)
    assert gaps[0] == pytest.approx(0.01 + 1e-4 * (4096 + 16))
    assert all(result["usual_gap"] < 0.0125 for result in results)
