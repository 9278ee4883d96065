"""Prefill first: a step admits whole prompts or decodes, never both."""

from refusals import assert_refused
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_simulate.virtual_clock import SimulatedRequest, StepRecord, simulate

COST = LinearCost(1.0)
"""A second a step."""
CACHE = CacheConfig(num_gpu_blocks=65, block_size=4, enable_prefix_caching=False)


def config(**more) -> SchedulerConfig:
    return SchedulerConfig(
        **{"max_model_len": 16, "max_num_seqs": 8, "max_num_batched_tokens": 16, "enable_chunked_prefill": False} | more
    )


def steps(*requests: SimulatedRequest, cache: CacheConfig = CACHE, **more) -> list[StepRecord]:
    return simulate(requests, Scheduler(config(**more), cache, PREFILL_FIRST), COST).steps


def test_waiting_requests_go_before_running_ones():
    chat, late = SimulatedRequest(2, 4), SimulatedRequest(12, 2, arrival=1.5)
    assert [step.scheduled for step in steps(chat, late)] == [{"0": 2}, {"0": 1}, {"1": 12}, {"0": 1, "1": 1}, {"0": 1}]


def test_whole_prompts_share_a_step_while_they_fit():
    """The third prompt would be cut, so it gets a step of its own, and the running requests wait
    for it.
    """
    first = steps(SimulatedRequest(8, 3), SimulatedRequest(8, 3), SimulatedRequest(5, 3))[:3]
    assert [step.scheduled for step in first] == [{"0": 8, "1": 8}, {"2": 5}, {"0": 1, "1": 1, "2": 1}]


def test_without_room_for_a_waiting_request_it_decodes():
    tight = CacheConfig(num_gpu_blocks=4, block_size=4, enable_prefix_caching=False)
    run = steps(SimulatedRequest(8, 3), SimulatedRequest(8, 2), cache=tight)
    assert [list(step.scheduled) for step in run] == [["0"], ["0"], ["0"], ["1"], ["1"]]
    assert len(steps(SimulatedRequest(8, 3), SimulatedRequest(8, 2), max_num_seqs=1)) == 5


def test_all_requests_end_though_memory_is_short():
    tight = CacheConfig(num_gpu_blocks=6, block_size=4, enable_prefix_caching=False)
    run = simulate([SimulatedRequest(4, 10)] * 3, Scheduler(config(), tight, PREFILL_FIRST), COST)
    assert run.num_preemptions
    assert [len(request.token_times) for request in run.requests] == [10, 10, 10]


def test_a_prompt_that_would_have_to_be_cut_is_refused():
    assert_refused("disable chunked prefill", steps, SimulatedRequest(8, 2), enable_chunked_prefill=True)
