"""Steps that are simulated as one stretch equal the single steps of the simulation, one for one."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused
from simulate.linear_cost import LinearCost
from simulate.test_virtual_clock import workloads

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.offline import run_offline
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

COST = LinearCost(per_step=1.0, per_request=0.1, per_token=0.01, per_pair=1e-4)


@given(workloads(arrive=False), st.sampled_from([0, 0, 2]), st.sampled_from([StepShape.of, StepShape.without_cache]))
@settings(max_examples=50, deadline=None)
def test_the_steps_are_those_of_the_simulation(case, num_drafts, shape_of):
    work, config, blocks = case
    config = replace(config, drafting=DraftingConfig(num_speculative_tokens=num_drafts))
    single = simulate(work, Scheduler(config, blocks), COST, acceptance=0.5, shape_of=shape_of)
    result = run_offline(work, config, blocks, acceptance=0.5, shape_of=shape_of)
    shapes = [stretch.at(index) for stretch in result.stretches for index in range(stretch.steps)]
    assert shapes == [step.shape for step in single.steps]
    assert result.num_steps == len(single.steps)
    assert result.preemptions == single.num_preemptions
    assert result.prefix_hits == sum(request.num_cached_tokens for request in single.requests)
    seconds = sum(stretch.seconds(COST) for stretch in result.stretches)
    assert seconds == pytest.approx(single.seconds, rel=1e-4)
    assert result.request_steps == sum(step.shape.num_reqs for step in single.steps)
    assert result.computed_tokens == sum(step.shape.num_tokens for step in single.steps)


def test_a_long_run_takes_few_strokes():
    work = [SimulatedRequest(20, 400), SimulatedRequest(20, 300)]
    result = run_offline(work, SchedulerConfig(max_model_len=512), CacheConfig(num_gpu_blocks=100))
    assert result.num_steps == 400
    assert len(result.stretches) == 3  # both prompts, both until one ends, one alone


@pytest.mark.parametrize(
    "work", [[SimulatedRequest(1, 1, arrival=1.0)], [SimulatedRequest(1, 1), SimulatedRequest(1, 1, after=0)]]
)
def test_only_what_is_there_at_the_start_can_be_run(work):
    assert_refused("", run_offline, work, SchedulerConfig(max_model_len=8), CacheConfig(num_gpu_blocks=9))
