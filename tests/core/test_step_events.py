"""What the recorder writes, replayed, is the scheduler's state; and the scheduler does the same unwatched."""

import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from conformance.workloads import random_workload
from core import test_remote_kv as remote
from core.driving import Drive, make_scheduler
from core.test_async_scheduler import RunAhead
from core.test_random_workloads import SEEDS, Run, random_request
from hypothesis import example, given, settings

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.messages import EngineCoreOutput
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.step_events import (
    SECONDS_KEPT_BACK,
    STEPS_BETWEEN_KEYS,
    WAITING_SHOWN,
    KeyLine,
    Scheduled,
    StepLine,
    StepRecorder,
)
from minivllm.entrypoints.xray.recorder import is_key
from minivllm_lab.step_recording import ReplayedState


class Watched:
    """A recorder, and the state as its lines tell of it."""

    def __init__(self, scheduler: Scheduler, in_flight: Callable[[], Iterable[SchedulerOutput]] = tuple) -> None:
        self.scheduler = scheduler
        self.recorder = StepRecorder(scheduler, in_flight)
        self.lines: list[bytes] = []
        self.state: ReplayedState | None = None
        self.as_it_was: dict[int, dict[str, Any]] = {}
        """What was true after each step."""

    def read(self) -> None:
        for line in self.recorder.take():
            before = self.state
            told = self.take_in(line)
            if is_key(line) and before is not None and told.step == before.step:
                assert (told.requests, told.cached, told.waiting) == (
                    before.requests,
                    before.cached,
                    before.waiting,
                ), "a key line says what the lines before it say"

    def take_in(self, line: bytes) -> ReplayedState:
        self.lines.append(line)
        if is_key(line):
            self.state = ReplayedState.of(msgspec.json.decode(line, type=KeyLine))
        else:
            assert self.state is not None
            self.state.apply(msgspec.json.decode(line, type=StepLine))
        assert self.state is not None
        return self.state

    def remember(self) -> None:
        """Reads nothing yet."""
        self.as_it_was[len(self.as_it_was) + 1] = as_it_is(self.scheduler)

    def check_all(self) -> None:
        """What was told since the beginning was so at the time."""
        told = {}
        for line in self.recorder.take():
            state = self.take_in(line)
            told[state.step] = as_told(state)
        assert told == {0: told[0]} | self.as_it_was

    def check(self) -> None:
        """The told state is the real one."""
        self.read()
        assert self.state is not None
        assert as_told(self.state) == as_it_is(self.scheduler)


def as_told(state: ReplayedState) -> dict[str, Any]:
    """Requests that run, what they hold, and the queue."""
    return {
        "running": {
            one.request_id: (
                list(one.blocks), one.num_tokens, one.num_computed_tokens, one.num_preemptions, one.prompt_tokens,
                one.max_tokens, one.adapter,
            )
            for one in state.requests.values()
            if one.running
        },
        "cached": set(state.cached),
        "held": {block: len(holders) for block, holders in state.holders().items()},
        "waiting": (state.waiting[0], [state.requests[number].request_id for number in state.waiting[1]]),
    }  # fmt: skip


def as_it_is(scheduler: Scheduler) -> dict[str, Any]:
    """The same of the scheduler."""
    manager = scheduler.kv_cache_manager
    blocks = manager.block_pool.blocks
    return {
        "running": {
            one.request_id: (
                manager.get_block_ids(one.request_id), one.num_tokens, one.num_computed_tokens, one.num_preemptions,
                one.num_prompt_tokens, one.max_tokens, one.lora_request.lora_name if one.lora_request else "",
            )
            for one in scheduler.running
        },
        "cached": {block.block_id for block in blocks if block.block_hash is not None},
        "held": {block.block_id: block.ref_cnt for block in blocks if block.ref_cnt},
        "waiting": (len(scheduler.waiting), [one.request_id for one in scheduler.waiting][:WAITING_SHOWN]),
    }  # fmt: skip


class WatchedRun(Run):
    """A random workload under a recorder, which is read after each step, or at the end; or the same without one."""

    def __init__(self, scheduler: Scheduler, rng: Random, watch: bool, at_the_end: bool = False) -> None:
        super().__init__(scheduler, rng)
        self.steps: list[dict[str, int]] = []
        self.watched = Watched(scheduler) if watch else None
        self.at_the_end = at_the_end

    def step(self, aborts_under_way: list[str]) -> None:
        output: SchedulerOutput = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        sampled = self.worker.execute(output)
        self.abort(aborts_under_way)
        outputs = self.scheduler.update_from_output(output, sampled)
        for one in outputs:
            self.receive(one)
        self.scheduler.update_draft_token_ids(self.drafts(list(sampled.sampled_token_ids)))
        if self.watched is None:
            return
        self.watched.recorder.observe(output, outputs)
        if self.at_the_end:
            self.watched.remember()
        else:
            self.watched.check()


def random_scheduler(
    workload: dict[str, Any], rng: Random, kind: type[Scheduler] = Scheduler, **settings: Any
) -> Scheduler:
    config = workload["config"]
    drafts = rng.choice([0, 0, 2])
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "policy")
    return kind(
        SchedulerConfig(
            **{name: config[name] for name in names},
            **settings,
            enable_chunked_prefill=config["enable_chunked_prefill"],
            drafting=DraftingConfig(num_speculative_tokens=drafts),
        ),
        CacheConfig(
            num_gpu_blocks=config["num_blocks"] + 2 * drafts,
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
        ),
    )


def run(seed: int, watch: bool, at_the_end: bool = False) -> WatchedRun:
    rng = Random(seed)
    workload = random_workload(rng)
    under_way = WatchedRun(random_scheduler(workload, rng), rng, watch, at_the_end)
    entries, step = workload["requests"], 0
    while step <= max(one["arrival_step"] for one in entries) or under_way.scheduler.has_unfinished_requests():
        for entry in entries:
            if entry["arrival_step"] == step:
                under_way.add(random_request(entry, under_way.scheduler.config, rng))
        between, during = ([], workload["aborts"].get(str(step), []))[:: rng.choice([1, -1])]
        under_way.abort(between)
        under_way.step(during)
        step += 1
    return under_way


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_the_lines_tell_the_state_and_watching_changes_nothing(seed: int) -> None:
    watched, alone = run(seed, True), run(seed, False)
    assert watched.steps == alone.steps
    assert watched.received == alone.received
    assert watched.reasons == alone.reasons


@settings(max_examples=50, deadline=None)
@given(seed=SEEDS)
def test_lines_that_were_kept_back_tell_what_was_so_in_their_step(seed: int) -> None:
    watched = run(seed, True, at_the_end=True).watched
    assert watched is not None
    watched.check_all()


class WatchedAhead(RunAhead):
    """A random workload with steps in flight. Its recorder begins while they are, and tells the whole state often."""

    watched: Watched | None = None

    def watch(self) -> None:
        self.watched = watched = Watched(self.scheduler, lambda: [output for output, _ in self.in_flight])
        update = self.scheduler.update_from_output

        def watched_update(output: SchedulerOutput, sampled: ModelRunnerOutput) -> list[EngineCoreOutput]:
            outputs = update(output, sampled)
            watched.recorder.observe(output, outputs)
            for line in watched.recorder.take():
                before = watched.state
                state = watched.take_in(line)
                if is_key(line) and before is not None:
                    self.compare(state, before)
            return outputs

        self.scheduler.update_from_output = watched_update  # type: ignore[method-assign]

    def compare(self, key: ReplayedState, before: ReplayedState) -> None:
        """A key line, made of the scheduler's state, says what the lines say, although others are scheduled already.

        Only of a request that has been aborted since there is nothing left in it.
        """
        assert (key.step, key.cached, key.waiting[0]) == (before.step, before.cached, before.waiting[0])
        preempted = {name for output, _ in self.in_flight for name in output.preempted_req_ids}
        for number, one in before.requests.items():
            if one.request_id not in self.scheduler.requests:
                assert number not in key.requests
            elif one.request_id in preempted:
                told = key.requests[number]
                assert (told.running, told.num_preemptions) == (one.running, one.num_preemptions)
                assert 0 <= told.num_computed_tokens <= one.num_computed_tokens
            else:
                assert key.requests[number] == one


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
@example(seed=68988)  # a request is preempted by a step in flight, and aborted before that step's line
@example(seed=478297502)  # the last requests are aborted with three steps in flight
def test_a_key_line_leaves_out_what_steps_in_flight_have_changed(seed: int) -> None:
    """Their own lines tell that: else it would count twice from then on."""
    rng = Random(seed)
    workload = random_workload(rng)
    scheduler = random_scheduler(workload, rng, AsyncScheduler, async_scheduling=True)
    under_way = WatchedAhead(scheduler, rng)
    under_way.depth = rng.choice([2, 4])
    begins, step, entries = rng.randrange(12), 0, workload["requests"]
    with patch("minivllm.core.step_events.STEPS_BETWEEN_KEYS", 3):
        last_arrival = max(one["arrival_step"] for one in entries)
        while step <= last_arrival or scheduler.has_unfinished_requests() or under_way.in_flight:
            if step == begins:
                under_way.watch()
            for entry in entries:
                if entry["arrival_step"] == step:
                    under_way.add(random_request(entry, scheduler.config, rng))
            under_way.step(workload["aborts"].get(str(step), []))
            step += 1
        if under_way.watched is not None:
            under_way.watched.recorder.observe_idle()
            under_way.watched.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_progress_that_a_failed_load_costs_is_told(ahead: bool) -> None:
    """A block that should have come from elsewhere has not, and is computed here after all."""
    run = remote.Run({"r": remote.Plan(num_tokens=8, fails=(1,))}, recompute=True, ahead=ahead, num_gpu_blocks=30)
    watched = Watched(run.scheduler, lambda: [output for output, _ in run.in_flight])
    run.add("a", 5, max_tokens=9)
    run.add("r", 10, max_tokens=4)
    update = run.scheduler.update_from_output

    def watched_update(output: SchedulerOutput, sampled: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs = update(output, sampled)
        watched.recorder.observe(output, outputs)
        for line in watched.recorder.take():
            watched.take_in(line)
        assert watched.state is not None
        for one in watched.state.requests.values():
            if one.request_id in run.scheduler.requests:
                request = run.scheduler.requests[one.request_id]
                under_way = sum(output.num_scheduled_tokens.get(one.request_id, 0) for output, _ in run.in_flight)
                assert one.num_tokens == request.num_tokens
                assert one.num_computed_tokens == request.num_computed_tokens - under_way
        return outputs

    run.scheduler.update_from_output = watched_update  # type: ignore[method-assign]
    run.finish()
    assert sum(map(is_key, watched.lines)) == 2, "at the beginning, and after the failure"


class Told(Drive):
    """The small scheduler of the other tests, under a recorder."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(make_scheduler(**settings))
        self.watched = Watched(self.scheduler)

    def schedule(self) -> SchedulerOutput:
        self.output = super().schedule()
        return self.output

    def line(self) -> StepLine:
        """Runs a step; returns what is told of it."""
        self.step()
        self.watched.recorder.observe(self.output, self.engine_outputs)
        self.watched.check()
        return msgspec.json.decode(next(one for one in reversed(self.watched.lines) if not is_key(one)), type=StepLine)


def test_a_step_of_decodes_is_one_number_for_each_request() -> None:
    told = Told()
    told.add("a", 4)
    told.add("b", 5)
    told.line()
    decode = told.line()
    assert decode.batch == [1, 2]
    assert (decode.named, decode.admitted, decode.ended) == ([], [], [])
    assert len(msgspec.json.encode(decode)) < 60


def test_steps_that_repeat_the_one_before_are_written_together() -> None:
    """They are told at once to who asks for all, and after a while to who does not."""
    told = Told(num_gpu_blocks=100, max_model_len=200, block_size=64)
    told.add("a", 4, max_tokens=50)
    told.line()
    recorder = told.watched.recorder
    with patch("minivllm.core.step_events.SECONDS_KEPT_BACK", 60.0):
        for _ in range(3):
            told.step()
            recorder.observe(told.output, told.engine_outputs)
    decodes = told.watched.recorder.take(all_of_them=False)
    assert len(decodes) == 1, "the first of them is none"
    told.watched.lines += decodes
    assert told.watched.state is not None
    told.watched.state.apply(msgspec.json.decode(decodes[0], type=StepLine))
    assert told.line().batch == [1]
    assert [msgspec.json.decode(line, type=StepLine).step for line in told.watched.lines[2:]] == [2, 3, 4, 5]
    deadline = time.monotonic() + 60
    while not (late := recorder.take(all_of_them=False)) and time.monotonic() < deadline:
        told.step()
        recorder.observe(told.output, told.engine_outputs)
        time.sleep(SECONDS_KEPT_BACK / 3)
    assert 2 <= len(late) <= 10
    for one in late:
        told.watched.state.apply(msgspec.json.decode(one, type=StepLine))
    told.watched.check()


def test_an_id_that_is_used_again_is_another_request() -> None:
    told = Told()
    told.add("a", 4, max_tokens=3)
    told.line()
    told.line()
    assert told.line().ended == [(1, "length")]
    told.add("a", 1, max_tokens=3)
    assert told.line().batch == [2]
    assert told.line().batch == [2]


def test_a_request_without_output_does_not_decode() -> None:
    """It was aborted while the step was computed."""
    told = Told()
    told.add("a", 4)
    told.add("b", 4)
    told.line()
    told.line()
    told.step()
    told.watched.recorder.observe(told.output, told.engine_outputs[:1])
    told.watched.read()
    assert msgspec.json.decode(told.watched.lines[-1], type=StepLine).batch == [1, Scheduled(2, 1, 0, 0)]


def test_a_queue_of_the_same_length_is_told_where_others_wait_in_it() -> None:
    told = Told(max_num_seqs=1)
    for name in "abc":
        told.add(name, 4, max_tokens=9)
    assert told.line().waiting == (2, [2, 3])
    told.line()
    told.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    told.add("d", 4)
    assert told.line().waiting == (2, [3, 4])


def test_slots_of_adapters_are_told_when_they_change() -> None:
    told = Told()
    told.add("a", 4)
    told.line()
    told.line()
    told.scheduler.lora_slots = [("x", True)]
    assert told.line().slots == [("x", True)]
    assert told.line().slots == []


def test_prefix_hits_sharing_and_eviction_are_told() -> None:
    told = Told(num_gpu_blocks=5)
    told.add("a", list(range(9)), max_tokens=2)
    first = told.line()
    assert first.admitted[0].blocks == [1, 2, 3]
    assert first.stored == [1, 2]
    assert told.line().ended == [(1, "length")]
    told.add("b", list(range(9)), max_tokens=2)
    second = told.line()
    assert second.admitted[0].num_cached_tokens == 8
    assert second.admitted[0].blocks[:2] == [1, 2]
    told.line()
    told.add("c", 13, max_tokens=2)
    assert {1, 2} <= set(told.line().removed)


def test_a_block_that_is_published_and_withdrawn_in_one_step_is_not_stored() -> None:
    told = Told()
    told.add("a", 9)
    output = told.schedule()
    pool = told.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks([pool.blocks[2]])
    told.watched.recorder.observe(output, told.scheduler.update_from_output(output, told.worker.execute(output)))
    told.watched.check()
    line = msgspec.json.decode(told.watched.lines[-1], type=StepLine)
    assert (line.stored, line.removed) == ([1], [2])


def test_a_preemption_is_told() -> None:
    told = Told(num_gpu_blocks=5, enable_prefix_caching=False)
    told.add("a", 7, max_tokens=6)
    told.add("b", 7, max_tokens=6)
    lines = [told.line() for _ in range(3)]
    assert [line.preempted for line in lines] == [[], [], [2]]
    assert lines[2].waiting == (1, [2])


def test_a_key_line_comes_every_so_many_steps_and_when_the_scheduler_starts_over() -> None:
    told = Told(max_model_len=STEPS_BETWEEN_KEYS + 20, num_gpu_blocks=100, block_size=64)
    told.add("a", 4, max_tokens=STEPS_BETWEEN_KEYS + 9)
    for _ in range(STEPS_BETWEEN_KEYS + 1):
        told.line()
    assert [is_key(line) for line in told.watched.lines] == [
        True, *[False] * STEPS_BETWEEN_KEYS, True, False
    ]  # fmt: skip
    told.add("b", 4)
    told.scheduler.start_over(["a"])
    told.worker.requests.clear()
    told.watched.recorder.observe_idle()
    told.watched.check()
    assert is_key(told.watched.lines[-1])
    told.line()


def test_starting_over_has_a_number_of_its_own() -> None:
    """So the step before it is still shown as it was."""
    told = Told()
    told.add("a", 9)
    assert told.line().step == 1
    assert told.watched.state is not None
    assert told.watched.state.cached == {1, 2}
    told.scheduler.start_over(())
    told.watched.recorder.observe_idle()
    told.watched.check()
    assert (told.watched.state.step, told.watched.state.waiting) == (2, (1, [1]))


def test_what_happens_while_nothing_runs_is_told() -> None:
    told = Told()
    told.add("a", 9)
    told.line()
    told.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    told.watched.recorder.observe_idle()
    told.watched.check()
    assert msgspec.json.decode(told.watched.lines[-1], type=StepLine).ended == [(1, "abort")]
    assert told.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    told.watched.recorder.observe_idle()
    told.watched.check()
    assert told.watched.state is not None
    assert told.watched.state.cached == set()


def test_nobody_watches_after_the_end() -> None:
    told = Told()
    told.watched.recorder.stop()
    told.add("a", 9)
    told.step()
    assert told.scheduler.kv_cache_manager.block_pool.kv_event_queue is None


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_queue_is_counted_and_its_head_named(policy: str) -> None:
    told = Told(policy=policy, max_num_seqs=1)
    for index in range(40):
        told.add(f"r{index:02}", 4, priority=40 - index)
    line = told.line()
    assert line.waiting is not None
    assert (line.waiting[0], len(line.waiting[1])) == (39, WAITING_SHOWN)
