"""Test requests with a KV connector: its three answers, the blocks that stay held, and loads that
fail.
"""

import json
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import pytest
from core.connector_double import ConnectorDouble, Plan, RemoteWorkerDouble
from core.driving import make_scheduler
from core.test_random_workloads import SEEDS, Run, toy_model
from core.worker_double import WorkerDouble
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.kv_connector import KVConnectorBase_V1
from minivllm.core.lora_request import LoRARequest
from minivllm.core.remote_kv import LOAD_FAILED, RemoteKV
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.engine.step_recorder import StepRecorder


class ConnectorRun(Run):
    """A run with a connector, whose loads may fail. `ahead` keeps steps in flight."""

    def __init__(
        self, connector: KVConnectorBase_V1, worker: WorkerDouble, rng: Random, ahead: bool = False, **rest: Any
    ) -> None:
        scheduler = make_scheduler(AsyncScheduler if ahead else Scheduler, async_scheduling=ahead, **rest)
        recomputes = connector.config.kv_transfer_config.kv_load_failure_policy == "recompute"
        scheduler.use_connector(connector, recomputes)
        super().__init__(scheduler, rng, 1 + ahead, worker)

    @property
    def remote(self) -> RemoteKV:
        assert self.scheduler.remote is not None
        return self.scheduler.remote

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 3, **arguments: Any) -> Request:
        return super().add(request_id, prompt, max_tokens, **arguments)

    def update(self) -> list[EngineCoreOutput]:
        _, done = self.in_flight[0]
        if not (report := done.kv_connector_output) or not report.invalid_block_ids:
            return super().update()
        lost = self.remote.failed_loads(report, self.scheduler.requests)
        self.last |= {name: EngineCoreOutput.failed(name, LOAD_FAILED) for name in lost}
        self.fail_step(lost)
        return []

    def serve(self, prompts: Iterable[list[int]]) -> None:
        """Add requests every few steps, abort some and fail some steps, and step until all have ended."""
        for index, prompt in enumerate(prompts):
            order = {"priority": self.rng.randint(0, 2), "arrival_time": float(index)}
            self.add(f"r{index}", prompt, self.rng.randint(1, 12), **order)
            for _ in range(self.rng.choice([0, 0, 1, 3, 6])):
                self.step()
            if self.rng.random() < 0.15:
                self.abort([self.rng.choice(list(self.requests))])
            if self.rng.random() < 0.05:
                self.fail_step()
        self.finish()


class PlannedRun(ConnectorRun):
    """A run whose connector follows `plans`."""

    def __init__(
        self, plans: dict[str, Plan], recompute: bool = False, rng: Random | None = None, **settings: Any
    ) -> None:
        self.connector = ConnectorDouble(plans, kv_load_failure_policy="recompute" if recompute else "fail")
        super().__init__(self.connector, RemoteWorkerDouble(4, toy_model), rng or Random(0), **settings)


def test_nobody_waits_for_one_that_a_pinned_adapter_keeps_out() -> None:
    """Another adapter is pinned while the keys and values of `r` are loaded; other requests go on
    until it is unpinned.
    """
    run = PlannedRun({"r": Plan(num_tokens=10, load_steps=2)}, max_loras=1)
    adapter = LoRARequest("one", 1, "/one")
    request = run.add("r", 10, lora_request=adapter)
    run.step()
    run.scheduler.pinned_loras.add(2)
    for _ in range(3):
        run.step()
    assert list(run.remote.received) == [request]
    run.add("plain", 3)
    run.add("pinned", 3, lora_request=LoRARequest("two", 2, "/two"))
    assert run.step() == {"plain": 3, "pinned": 3}
    run.scheduler.pinned_loras.clear()
    run.add("late", 3)
    assert run.step() == {"plain": 1, "pinned": 1}, "it waits for the slot, and others for it"
    run.finish()


def test_basic_lifecycle() -> None:
    """Two and a half blocks are loaded: they are held immediately, and no request finds them before
    they are loaded.
    """
    run = PlannedRun({"r": Plan(num_tokens=10, load_steps=2)})
    request = run.add("r", 10)
    output = run.schedule()
    assert not output.num_scheduled_tokens
    run.add("behind", 40 - 3, max_tokens=1)
    shown = json.loads(StepRecorder(run.scheduler).snapshot(output))["waiting"]
    assert [entry["id"] for entry in shown] == ["r", "behind"], "the one that loads, before the one that waits"
    run.abort(["behind"])
    run.update()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert run.num_free == 7
    assert not run.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
    assert run.scheduler.make_stats().num_waiting_reqs == 1
    assert run.step() == {}
    assert run.step() == {"r": 1}
    assert len(run.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block) == 2
    assert (request.num_cached_tokens, request.num_external_computed_tokens) == (9, 10)
    run.finish()
    stats = run.scheduler.make_stats().connector_prefix_cache_stats
    assert stats is not None
    assert (stats.queries, stats.hits) == (10, 10)


def test_async_load_reserves_blocks_for_inflight() -> None:
    """A second load must not take the blocks that the first needs to finish its prompt."""
    run = PlannedRun({"a": Plan(num_tokens=4, load_steps=4), "b": Plan(num_tokens=16, load_steps=1)}, num_gpu_blocks=8)
    a, b = run.add("a", 16), run.add("b", 17)
    run.step()
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert b.status is RequestStatus.WAITING
    assert run.num_free == 6
    run.finish()


def test_the_connector_does_not_know_yet() -> None:
    """Other requests go first, and the connector is asked once in each step."""
    run = PlannedRun({"a": Plan(num_tokens=4, num_unknown=2)})
    run.add("a", 9)
    run.add("b", 9)
    assert run.step() == {"b": 9}
    assert run.step() == {"b": 1}
    assert run.step() == {"b": 1, "a": 5}
    assert run.connector.asked == {"a": 3, "b": 1}
    run.finish()


def test_blocks_are_kept_until_they_are_sent() -> None:
    run = PlannedRun({"p": Plan(send_steps=3)})
    run.add("p", 9, max_tokens=1)
    run.step()
    assert run.last["p"].kv_transfer_params == {"remote_block_ids": [1, 2, 3]}
    assert run.num_free == 7
    assert run.scheduler.has_unfinished_requests()
    assert not run.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()
    run.step()
    assert run.num_free == 7
    run.finish()


@pytest.mark.parametrize(("load_steps", "fails"), [(0, (1,)), (2, (1,)), (2, None)])
def test_a_failed_load_ends_the_request_by_default(load_steps: int, fails: tuple[int, ...] | None) -> None:
    run = PlannedRun({"r": Plan(num_tokens=12, load_steps=load_steps, fails=fails)})
    run.add("r", 14)
    run.add("other", 5, max_tokens=6)
    run.finish()
    assert run.last["r"].error == LOAD_FAILED
    assert run.last["r"].finish_reason == "error"
    assert not run.received["r"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("load_steps", "fails"), [(0, (1,)), (0, None), (2, (1, 2)), (2, None)])
def test_a_failed_load_is_recomputed(load_steps: int, fails: tuple[int, ...] | None, ahead: bool) -> None:
    run = PlannedRun({"r": Plan(num_tokens=12, load_steps=load_steps, fails=fails)}, recompute=True, ahead=ahead)
    request = run.add("r", 14, max_tokens=6)
    counts = [run.step().get("r", 0) for _ in range(load_steps + 3)]
    assert 14 in counts
    run.finish()
    assert request.num_external_computed_tokens == 0
    assert run.connector.asked["r"] == 1


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_only_the_request_whose_own_load_fails_ends(recompute: bool, ahead: bool) -> None:
    """`b` and the loading `c` have found blocks that `a` loads, among them the invalid one. All of
    them compute it themselves.
    """
    plans = {"a": Plan(num_tokens=12, fails=(1,)), "c": Plan(num_tokens=24, load_steps=3)}
    run = PlannedRun(plans, recompute=recompute, ahead=ahead, num_gpu_blocks=30, max_num_batched_tokens=64)
    prompt = [1, 2, 3, 0] * 5
    run.add("a", [*prompt, 1], max_tokens=4)
    b = run.add("b", [*prompt, 2, 2, 2], max_tokens=4)
    c = run.add("c", [*prompt, 3, 3, 3, 3, 3], max_tokens=4)
    run.schedule()
    assert (b.num_cached_tokens, c.num_computed_tokens) == (20, 24)
    if not ahead:
        run.update()
    run.finish()
    assert {name for name, output in run.last.items() if output.error} == ({"a"} - {"a" * recompute})
    assert c.num_external_computed_tokens == 0, "its own load is abandoned, too"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_fails_gives_up_loads_and_keeps_what_is_being_sent(ahead: bool) -> None:
    plans = {"p": Plan(send_steps=6), "r": Plan(num_tokens=8, load_steps=4), "gone": Plan(num_tokens=4, load_steps=9)}
    run = PlannedRun(plans, ahead=ahead, num_gpu_blocks=20)
    run.add("p", 9, max_tokens=1)
    run.step()
    run.step()
    run.add("r", 9)
    run.add("gone", 9)
    run.step()
    held = [block.block_id for block in run.scheduler.kv_cache_manager.req_to_blocks["p"]]
    before = {slot: prefix for slot, prefix in run.worker.slots.items() if slot[0] in held}
    run.fail_step({"gone"})
    del run.requests["gone"]
    assert run.scheduler.kv_cache_manager.get_block_ids("p") == held
    assert "gone" in run.connector.ended
    run.add("more", 20)
    while "p" in run.scheduler.kv_cache_manager.req_to_blocks:
        assert {slot: run.worker.slots[slot] for slot in before} == before
        run.step()
    run.finish()


def random_plan(rng: Random, num_prompt_tokens: int) -> Plan:
    fails = rng.choice([(), (), (), (0,), (1,), (0, 2), None])
    return Plan(
        num_tokens=rng.choice([0, num_prompt_tokens, rng.randint(0, num_prompt_tokens)]),
        num_unknown=rng.choice([0, 0, 0, 1, 4]),
        load_steps=rng.choice([0, 0, 1, 2, 6]),
        fails=fails,
        send_steps=rng.choice([0, 0, 0, 1, 5]),
    )


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_whatever_the_connector_does_everybody_ends_with_the_right_tokens(
    seed: int, recompute: bool, ahead: bool
) -> None:
    rng = Random(seed)
    plans: dict[str, Plan] = {}
    run = PlannedRun(
        plans, recompute, rng, ahead=ahead, num_gpu_blocks=rng.randint(12, 40),
        max_num_seqs=rng.choice([1, 2, 3, 16]), max_num_batched_tokens=rng.choice([5, 16, 64]),
        long_prefill_token_threshold=rng.choice([0, 0, 7]), policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.0, 0.1]), scheduler_reserve_full_isl=rng.random() < 0.8,
        enable_prefix_caching=rng.random() < 0.8,
    )  # fmt: skip

    def prompts() -> Iterator[list[int]]:
        for index in range(rng.randint(1, 12)):
            length = rng.randint(1, 34)
            plans[f"r{index}"] = random_plan(rng, length)
            yield [rng.choice([0, 1]) if rng.random() < 0.2 else place % 4 for place in range(length)]

    run.serve(prompts())
    for name, output in run.last.items():
        assert output.error is None or (not recompute and plans[name].fails != ())
        assert run.requests[name].num_external_computed_tokens >= 0
