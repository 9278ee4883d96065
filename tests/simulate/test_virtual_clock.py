"""The simulation decides what the scheduler decides, loses no token, and its clock only goes
forward.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.continuous_batching.seats import assign_seats
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.simulated_engine import GENERATED
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate, simulate_in_parts

COST = LinearCost(per_step=1.0, per_request=0.1, per_token=0.01)


@st.composite
def workloads(draw, arrive=True):
    """Draw a few requests, and a pool that holds any one of them but hardly all. They arrive, or
    are all there at the start and share prefixes.
    """
    longest = 48 if arrive else 72
    lengths = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, longest - 32)), min_size=1, max_size=10))
    work = []
    for index, (prompt, output) in enumerate(lengths):
        shared = 0 if arrive else draw(st.integers(0, prompt))
        ids = None if arrive else (*range(1, shared + 1), *[-1 - index] * (prompt - shared))
        arrival, priority = (draw(st.floats(0, 30)), draw(st.integers(0, 2))) if arrive else (0.0, 0)
        work.append(SimulatedRequest(prompt, output, arrival, priority, prompt_token_ids=ids))
    chunked = draw(st.booleans())
    config = SchedulerConfig(
        max_model_len=longest,
        max_num_seqs=draw(st.integers(1, 12)),
        max_num_batched_tokens=draw(st.integers(1, longest) if chunked else st.integers(longest, 3 * longest)),
        enable_chunked_prefill=chunked,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        static_batching=draw(st.booleans()),
    )
    blocks = CacheConfig(
        num_gpu_blocks=draw(st.integers(longest // 4 + 1, longest)),
        block_size=4,
        enable_prefix_caching=draw(st.booleans()),
    )
    return work, config, blocks


def replayed(work, config, blocks, simulation):
    """Give the real scheduler each request at the first step that starts after its arrival; return
    the tokens of each step.
    """
    scheduler, steps, added = Scheduler(config, blocks), [], set()
    for step in simulation.steps:
        for index in sorted(range(len(work)), key=lambda i: work[i].arrival):
            if index not in added and work[index].arrival <= step.start:
                spec, name = work[index], str(index)
                prompt = [10_000 * (index + 1) + position for position in range(spec.prompt_tokens)]
                times = {"arrival_time": spec.arrival, "priority": spec.priority}
                scheduler.add_request(Request(name, prompt, max_tokens=spec.output_tokens, **times))
                added.add(index)
        output = scheduler.schedule()
        new, live = output.num_scheduled_tokens, scheduler.requests
        steps.append((dict(new), tuple(sorted(output.preempted_req_ids))))
        done = [name for name in new if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(output, ModelRunnerOutput({name: [7] for name in done}))
    assert not scheduler.has_unfinished_requests()
    return steps


@given(workloads())
@settings(max_examples=25, deadline=None)
def test_the_simulated_scheduler_decides_the_same_as_the_real_one(case):
    work, config, blocks = case
    simulation = simulate(work, Scheduler(config, blocks), COST)
    expected = replayed(work, config, blocks, simulation)
    assert [(list(step.scheduled.items()), step.preempted) for step in simulation.steps] == [
        (list(new.items()), preempted) for new, preempted in expected
    ]


@given(workloads())
@settings(max_examples=25, deadline=None)
def test_every_token_comes_once_within_the_limits_and_time_only_goes_forward(case):
    work, config, blocks = case
    simulation = simulate(work, Scheduler(config, blocks), COST)
    assert [len(request.token_times) for request in simulation.requests] == [request.output_tokens for request in work]
    for request, spec in zip(simulation.requests, work, strict=True):
        assert request.token_times == sorted(set(request.token_times)), "one token a step"
        assert request.ttft > 0
        assert min(request.itls, default=1) >= 1.0, "a step takes at least a second"
        assert request.latency == pytest.approx(request.ttft + sum(request.itls))
        assert request.tpot * max(spec.output_tokens - 1, 0) == pytest.approx(sum(request.itls))
    ends = [step.start + step.seconds for step in simulation.steps]
    assert all(start >= end for start, end in zip([s.start for s in simulation.steps[1:]], ends, strict=False))
    assert {time for request in simulation.requests for time in request.token_times} <= set(ends)
    assert simulation.output_tokens == sum(request.output_tokens for request in work)
    assert simulation.num_preemptions == sum(len(step.preempted) for step in simulation.steps)
    for step in simulation.steps:
        assert step.seconds == pytest.approx(COST.seconds(step.shape))
        assert step.shape.num_tokens == sum(step.scheduled.values()) <= config.max_num_batched_tokens
        assert step.num_running <= config.max_num_seqs
        assert 0 <= step.kv_cache_usage <= 1
    if not simulation.num_preemptions and not blocks.enable_prefix_caching:
        computed = sum(step.shape.num_tokens for step in simulation.steps)
        assert computed == sum(request.prompt_tokens + request.output_tokens - 1 for request in work)


def test_the_clock_jumps_over_idle_time_and_throughput_counts_from_the_first_arrival():
    work = [SimulatedRequest(1, 1, arrival=100.0), SimulatedRequest(1, 1, arrival=500.0)]
    simulation = simulate(work, Scheduler(SchedulerConfig(max_model_len=8), CacheConfig(num_gpu_blocks=4)), COST)
    assert [step.start for step in simulation.steps] == [100.0, 500.0]
    assert simulation.ttfts == pytest.approx([1.11, 1.11])
    assert simulation.throughput == pytest.approx(2 / 401.11)


def test_equal_prompts_hit_the_prefix_cache_and_made_up_ones_do_not():
    config, blocks = SchedulerConfig(max_model_len=64), CacheConfig(num_gpu_blocks=40, block_size=4)
    shared = [SimulatedRequest(17, 2, arrival, prompt_token_ids=list(range(17))) for arrival in (0.0, 50.0)]
    own = [SimulatedRequest(17, 2, arrival) for arrival in (0.0, 50.0)]
    for work, hits in ((shared, [0, 16]), (own, [0, 0])):
        run = simulate(work, Scheduler(config, blocks), COST)
        assert [request.num_cached_tokens for request in run.requests] == hits


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0, 1))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values, share):
    result = percentile(values, share)
    assert result in values
    assert sum(value <= result for value in values) >= share * len(values)
    assert all(sum(v <= value for v in values) < share * len(values) for value in values if value < result)


SMALL = SchedulerConfig(max_model_len=8), CacheConfig(num_gpu_blocks=9)


@pytest.mark.parametrize(
    ("work", "about"),
    [
        ([], "at least one request"),
        ([SimulatedRequest(8, 1)], "max_model_len"),
        ([SimulatedRequest(3, 1, prompt_token_ids=[1])], "prompt_tokens is 3"),
        *(
            ([SimulatedRequest(2, 2, after=after), SimulatedRequest(2, 2, after=0)], "after")
            for after in (0, 1, 7)  # itself, one that waits for it, none
        ),
    ],
    ids=str,
)
def test_a_workload_that_cannot_run_is_refused(work, about):
    assert_refused(about, simulate, work, Scheduler(*SMALL), COST)
    assert_refused(about, list, simulate_in_parts(work, Scheduler(*SMALL), COST, steps=1))


def test_a_percentile_of_nothing_or_beyond_all_is_refused():
    assert_refused("values", percentile, [], 0.5)
    assert_refused("share", percentile, [1.0], 1.5)


@given(workloads())
@settings(max_examples=40, deadline=None)
def test_everybody_keeps_a_seat_until_he_leaves(case):
    work, config, blocks = case
    steps = [list(step.scheduled) for step in simulate(work, Scheduler(config, blocks), COST).steps]
    rows = assign_seats(steps, config.max_num_seqs)
    assert len(rows) == config.max_num_seqs
    for index, step in enumerate(steps):
        assert sorted(filter(None, (row[index] for row in rows))) == sorted(step)
    for row in rows:
        for before, after, index in zip(row, row[1:], range(1, len(row)), strict=False):
            if before != after and before:
                assert before not in steps[index], "who stays in the batch does not change seats"


def test_a_follower_comes_after_its_predecessor_and_finds_its_blocks():
    """Turn two repeats turn one, its answer and a new question: all full blocks of the first are
    hits.
    """
    first = tuple(range(1, 13))
    second = (*first, *[GENERATED] * 8, 50, 51)
    work = [
        SimulatedRequest(len(second), 3, 2.5, prompt_token_ids=second, after=1),
        SimulatedRequest(len(first), 8, 1.0, prompt_token_ids=first),
    ]
    blocks = CacheConfig(num_gpu_blocks=20, block_size=4)
    run = simulate(work, Scheduler(SchedulerConfig(max_model_len=64), blocks), COST)
    later, earlier = run.requests
    assert later.arrival == pytest.approx(earlier.token_times[-1] + 2.5)
    assert min(later.token_times) > later.arrival
    # The first request's last token was never computed, so its block was not full.
    assert later.num_cached_tokens == 16


@given(workloads(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_drafts_change_the_steps_and_not_the_tokens(case, num_drafts, acceptance):
    work, config, blocks = case
    config = replace(config, drafting=DraftingConfig(num_speculative_tokens=num_drafts))
    blocks = replace(blocks, num_gpu_blocks=blocks.num_gpu_blocks + 1)  # for the drafts of the longest request
    run = simulate(work, Scheduler(config, blocks), COST, acceptance=acceptance)
    assert [len(request.token_times) for request in run.requests] == [request.output_tokens for request in work]
    assert max(step.shape.num_tokens for step in run.steps) <= config.max_num_batched_tokens
    for request in run.requests:
        assert request.token_times == sorted(request.token_times)
        most = max(request.token_times.count(time) for time in request.token_times)
        assert most <= 1 + num_drafts * (acceptance > 0)


def test_accepted_drafts_are_as_many_as_the_acceptance_says():
    """A verification of k drafts, each accepted with chance a, yields (1 - a^(k+1)) / (1 - a)
    tokens (Leviathan et al. 2023).
    """
    work = [SimulatedRequest(4, 4001)]
    config = SchedulerConfig(max_model_len=8192, drafting=DraftingConfig(num_speculative_tokens=3))
    blocks = CacheConfig(num_gpu_blocks=600)
    run = simulate(work, Scheduler(config, blocks), COST, acceptance=0.6)
    assert 4000 / (len(run.steps) - 1) == pytest.approx((1 - 0.6**4) / (1 - 0.6), rel=0.03)
    assert_refused("acceptance", simulate, work, Scheduler(config, blocks), COST, acceptance=1.2)


def test_without_a_cache_a_step_computes_all_that_was_computed_before():
    work, blocks = [SimulatedRequest(5, 4)], CacheConfig(num_gpu_blocks=9, enable_prefix_caching=False)
    run = simulate(work, Scheduler(SchedulerConfig(max_model_len=16), blocks), COST, shape_of=StepShape.without_cache)
    assert [step.shape.num_tokens for step in run.steps] == [5, 6, 7, 8]
    assert [step.shape.num_pairs for step in run.steps] == [15, 21, 28, 36]
    assert [step.scheduled["0"] for step in run.steps] == [5, 1, 1, 1]


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_no_arrival_and_no_step_is_before_time_zero(seconds):
    for arrival in (seconds, "now", None):
        words = r"arrival is .*; it must be 0 seconds or more"
        assert_refused(words, SimulatedRequest, 1, 1, arrival=arrival)
    cost = SimpleNamespace(seconds=lambda shape: seconds)
    assert_refused("the cost model returns", simulate, [SimulatedRequest(1, 2)], Scheduler(*SMALL), cost)


@given(workloads(), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_a_simulation_in_parts_is_the_same_as_one_in_one_go(case, steps):
    work, *configs = case
    *pauses, last = simulate_in_parts(work, Scheduler(*configs), COST, steps=steps)
    whole = simulate(work, Scheduler(*configs), COST)
    assert last == whole
    assert pauses == [None] * -(-len(whole.steps) // steps)


def test_lengths_that_are_no_counts_are_refused():
    for lengths in ((0, 1), (1, 0), ("x", 1), (1.0, 1)):
        assert_refused("_tokens must be a positive whole number", SimulatedRequest, *lengths)


def test_the_scheduler_is_asked_when_something_changes():
    asked = []

    work = [SimulatedRequest(4, 100), SimulatedRequest(4, 60, 30.0)]
    config, blocks = SchedulerConfig(max_model_len=128), CacheConfig(num_gpu_blocks=3, block_size=128)
    scheduler = Scheduler(config, blocks)
    schedule = scheduler.schedule
    scheduler.schedule = lambda: asked.append(1) or schedule()
    run = simulate(work, scheduler, COST)
    assert len(run.steps) == 100
    assert len(asked) == 4  # two prompts, two ends


def test_another_scheduler_can_decide():
    def one_at_a_time(scheduler, step):
        scheduler.schedule_running(step)
        if not scheduler.running:
            scheduler.admit(scheduler.waiting, step)

    policy = SchedulingPolicy(schedule=one_at_a_time)
    config, blocks = SchedulerConfig(max_model_len=16, max_num_seqs=4), CacheConfig(num_gpu_blocks=12, block_size=4)
    run = simulate([SimulatedRequest(4, 3)] * 3, Scheduler(config, blocks, policy), COST)
    assert {len(step.scheduled) for step in run.steps} == {1}
