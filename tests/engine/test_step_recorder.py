"""A snapshot is the scheduler's state, whatever has happened before, and recording does not change
what is scheduled.
"""

import json
from random import Random
from typing import Any

from conformance.workloads import random_workload
from core.test_random_workloads import SEEDS, Run, configs_of, serve
from hypothesis import given, settings

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.step_recorder import WAITING_SHOWN, StepRecorder


class WatchedScheduler(Scheduler):
    """A scheduler that is compared with the snapshot of each of its steps."""

    def __init__(self, *configs: Any) -> None:
        super().__init__(*configs)
        self.recorder, self.num_steps = StepRecorder(self), 0

    def update_from_output(self, output: SchedulerOutput, sampled: ModelRunnerOutput) -> list[EngineCoreOutput]:
        outputs = super().update_from_output(output, sampled)
        self.num_steps += 1
        told = json.loads(self.recorder.snapshot(output, outputs))
        check_state(self, told)
        assert [row[1] for row in told["batch"]] == list(output.num_scheduled_tokens.values())
        assert len(told["preempted"]) == len(output.preempted_req_ids)
        assert sum(row[3] for row in told["batch"]) == sum(len(output.new_token_ids) for output in outputs)
        admitted = {new.num_computed_tokens for new in output.scheduled_new_reqs}
        assert {row[4] for row in told["batch"]} - {-1} == admitted
        assert told["step"] == self.num_steps
        return outputs


def check_state(scheduler: Scheduler, told: dict[str, Any]) -> None:
    """Compare a snapshot with the scheduler it describes."""
    manager = scheduler.kv_cache_manager
    blocks = manager.block_pool.blocks

    def facts(request: Request) -> tuple[Any, ...]:
        lengths = request.num_prompt_tokens, request.num_tokens, request.num_computed_tokens, request.max_tokens
        return request.request_id, (*lengths, request.num_preemptions), manager.get_block_ids(request.request_id)

    def told_facts(told: dict[str, Any]) -> tuple[Any, ...]:
        lengths = tuple(told[name] for name in ("prompt", "tokens", "computed", "max", "preemptions"))
        return told["id"], lengths, told["blocks"]

    assert list(map(told_facts, told["running"])) == list(map(facts, scheduler.running))
    assert list(map(told_facts, told["waiting"])) == list(map(facts, scheduler.waiting))[:WAITING_SHOWN]
    assert told["num_waiting"] == len(scheduler.waiting)
    assert told["cached"] == [block.block_id for block in blocks if block.block_hash is not None]
    numbers = [item["number"] for item in (*told["running"], *told["waiting"])]
    assert len(set(numbers)) == len(numbers)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS)
def test_a_snapshot_is_the_state_and_watching_changes_nothing(seed: int) -> None:
    runs = []
    for kind in (WatchedScheduler, Scheduler):
        rng = Random(seed)
        workload, drafts = random_workload(rng), rng.choice([0, 0, 2])
        configs = configs_of(workload, drafts, drafting=DraftingConfig(num_speculative_tokens=drafts))
        runs.append(Run(kind(*configs), rng))
        serve(runs[-1], workload)
    assert runs[0].received == runs[1].received
    assert runs[0].reasons == runs[1].reasons
    assert runs[0].scheduler.make_stats() == runs[1].scheduler.make_stats()


def test_a_request_keeps_its_number_and_a_change_between_steps_is_no_step() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64),
        CacheConfig(num_gpu_blocks=9, block_size=4),
    )
    recorder = StepRecorder(scheduler)
    for name in "ab":
        scheduler.add_request(Request(name, [1, 2, 3, 4], max_tokens=2))
    first = json.loads(recorder.snapshot())
    assert (first["step"], [request["number"] for request in first["waiting"]]) == (0, [1, 2])
    step = scheduler.schedule()
    second = json.loads(recorder.snapshot(step))
    assert (second["step"], [row[0] for row in second["batch"]]) == (1, [1, 2])
    third = json.loads(recorder.snapshot())
    assert (third["step"], third["batch"], third["running"]) == (1, [], second["running"])
