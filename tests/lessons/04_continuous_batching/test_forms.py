"""Lesson 04's static batch is the engine's, and its formula is the mean over all batches, for any
lengths.
"""

import itertools
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.exercise import load
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

lesson = load(script_path("04"))
LENGTHS = st.tuples(st.integers(1, 60), st.integers(1, 8))
BLOCKS = CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_formula_is_the_mean_over_all_batches(lengths, batch):
    """E[max] is taken over every ordered batch that can be drawn from the sample, with repetition."""
    expected = statistics.mean(lengths) / statistics.mean(map(max, itertools.product(lengths, repeat=batch)))
    assert lesson.static_utilization(lengths, batch) == pytest.approx(expected)


@given(st.lists(LENGTHS, min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_static_batch_is_the_engines_static_batch(lengths, budget, places):
    """The exercise's checks compare its continuous steps with the engine's."""
    config = SchedulerConfig(
        max_model_len=4096, max_num_batched_tokens=budget, max_num_seqs=places, static_batching=True
    )
    work = [SimulatedRequest(*length) for length in lengths]
    run = simulate(work, Scheduler(config, BLOCKS), LinearCost(per_step=1.0))
    requests = [lesson.Request(str(i), *length) for i, length in enumerate(lengths)]
    assert [step.scheduled for step in run.steps] == list(lesson.Scheduler(requests, budget, places, True).steps())
