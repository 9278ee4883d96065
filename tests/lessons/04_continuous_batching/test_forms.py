"""Lesson 04's scheduler is the engine's, step by step, and its formula is the mean over all
batches, for any lengths.
"""

import statistics
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm_lab.exercise import checks_of, load
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

lesson = load(script_path("04"))
checks = {check.__name__: check for check in checks_of("04")}
engine_steps = checks["check_the_engine_decides_the_same"].__globals__["engine_steps"]
AMPLE = 4096
FIXED = LinearCost(per_step=1.0)
LENGTHS = st.tuples(st.integers(1, 60), st.integers(1, 8))


@given(
    st.lists(st.lists(LENGTHS, max_size=3), min_size=1, max_size=8),
    st.integers(1, 80),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([(AMPLE, 16), (17, 4), (68, 1)]),
)
@settings(max_examples=50, deadline=None)
def test_the_lessons_scheduler_is_the_engines(arrivals, budget, places, all_at_once, memory):
    """Every request has the same tokens in every step, in order, with ample memory and with
    preemptions.
    """
    if all_at_once:
        arrivals = [[arrival for step in arrivals for arrival in step]]
    coming = deque([(f"{s}.{i}", *arrival) for i, arrival in enumerate(step)] for s, step in enumerate(arrivals))
    expected = engine_steps(list(coming), budget, places, *memory)
    scheduler, steps = lesson.Scheduler([], budget, places, pool=lesson.Pool(*memory)), []
    while coming or scheduler.running or scheduler.waiting:
        scheduler.waiting.extend(lesson.Request(*arrival) for arrival in (coming.popleft() if coming else ()))
        steps.append(list(scheduler.schedule().items()))
        scheduler.update(dict(steps[-1]))
    assert steps == [list(step.items()) for step, _ in expected]


@given(st.lists(LENGTHS, min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_static_batch_is_the_engines_static_batch(lengths, budget, places):
    config = SchedulerConfig(
        max_model_len=4096, max_num_batched_tokens=budget, max_num_seqs=places, static_batching=True
    )
    blocks = CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False)
    run = simulate([SimulatedRequest(*length) for length in lengths], config, blocks, FIXED)
    requests = [lesson.Request(str(i), *length) for i, length in enumerate(lengths)]
    assert [step.scheduled for step in run.steps] == list(lesson.Scheduler(requests, budget, places, True).steps())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_the_formula_is_the_mean_over_all_batches(lengths, batch):
    """E[max] is taken over every ordered batch that can be drawn from the sample, with repetition."""
    batches = [[]]
    for _ in range(batch):
        batches = [[*batch, length] for batch in batches for length in lengths]
    expected = statistics.mean(lengths) / statistics.mean(max(batch) for batch in batches)
    assert lesson.static_utilization(lengths, batch) == pytest.approx(expected)
