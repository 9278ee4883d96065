"""A long prompt among chats: a smaller budget shortens the longest gap."""

import pytest
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig
from minivllm_lab.continuous_batching.report import long_prompt

CACHE = CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False)
COST = LinearCost(per_step=0.01, per_token=1e-4)


def test_a_smaller_budget_shortens_the_longest_gap_and_the_prompt_waits_longer():
    results = [long_prompt(budget, CACHE, COST) for budget in (8192, 1024, 128)]
    gaps, waits = [result["longest_gap"] for result in results], [result["ttft"] for result in results]
    assert gaps == sorted(gaps, reverse=True)
    assert waits == sorted(waits)
    assert gaps[0] == pytest.approx(0.01 + 1e-4 * (4096 + 16))
    assert all(result["usual_gap"] < 0.0125 for result in results)
