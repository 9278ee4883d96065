"""Serve random workloads: the bookkeeping agrees, each step advances a request, all end, and no
token is wrong.

The model here is a function of the preceding tokens, and its keys and values are the prefixes
themselves. So a request gets the answer that it would get alone, however its prompt was chunked,
shared or preempted, and whatever was drafted.
"""

import hashlib
from random import Random
from typing import Any

from conformance.workloads import random_workload
from core.driving import Drive
from core.worker_double import WorkerAhead, WorkerDouble
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm_lab.predict.workload import SCHEDULER_KEYS

SEEDS = st.integers(0, 2**32)


def toy_model(token_ids: list[int]) -> int:
    """Return one of four tokens, determined by the last three, so that outputs share blocks."""
    return hashlib.sha256(bytes(token & 255 for token in token_ids[-3:])).digest()[0] % 4


class Run(Drive):
    """A run whose answers are known, whose drafts are random, and whose every step is checked."""

    def __init__(self, scheduler: Scheduler, rng: Random, depth: int = 1, worker: WorkerDouble | None = None) -> None:
        kind = WorkerAhead if depth > 1 else WorkerDouble
        super().__init__(scheduler, worker or kind(scheduler.cache_config.block_size, toy_model), depth)
        self.rng = rng

    def schedule(self) -> SchedulerOutput:
        unfinished = self.scheduler.has_unfinished_requests()
        waits = self.scheduler.remote or any(step.num_scheduled_tokens for step, _ in self.in_flight)
        output = super().schedule()
        counts = output.num_scheduled_tokens
        assert all(count > 0 for count in counts.values())
        assert sum(counts.values()) == output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert bool(counts) == unfinished or (waits and not counts), "a step in which nobody advances"
        assert not output.preempted_req_ids & set(counts)
        assert not (output.preempted_req_ids and output.scheduled_new_reqs), "admission in a step that preempted"
        return output

    def propose(self, drafts: dict[str, list[int]]) -> None:
        """Guess some tokens after those that the worker knows; the first ones are often right."""
        for request_id, request in self.worker.requests.items():
            tokens = list(request.token_ids)
            for _ in range(self.rng.randint(0, self.scheduler.drafting.num_speculative_tokens)):
                tokens.append(toy_model(tokens) if self.rng.random() < 0.7 else self.rng.randrange(4))
            drafts[request_id] = tokens[len(request.token_ids) :]
        if isinstance(self.worker, WorkerAhead):
            self.worker.drafts = drafts
        else:
            super().propose(drafts)

    def finish(self) -> int:
        """Step until no request is left, then check tokens and blocks."""
        total = super().finish()
        assert self.num_free == self.scheduler.kv_cache_manager.block_pool.num_usable_blocks, "a block is lost"
        for name, request in self.requests.items():
            expected = alone(request, self.scheduler.config.max_model_len)
            assert self.received[name] == expected[: len(self.received[name])], f"{name}: another token"
            ended = self.last.get(name)
            assert (ended is None) == (request.status is RequestStatus.FINISHED_ABORTED)
            assert ended is None or ended.error or self.received[name] == expected
        return total


def alone(request: Request, max_model_len: int) -> list[int]:
    """Return a request's answer as computed without any scheduling."""
    tokens = list(request.prompt_token_ids)
    while len(tokens) < max_model_len and len(tokens) - request.num_prompt_tokens < request.max_tokens:
        tokens.append(toy_model(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


def serve(run: Run, workload: dict[str, Any]) -> None:
    """Add the workload's requests as they arrive, and step until all have ended."""
    entries, step = workload["requests"], 0
    last_arrival = max(entry["arrival_step"] for entry in entries)
    while step <= last_arrival or run.scheduler.has_unfinished_requests():
        for entry in entries:
            if entry["arrival_step"] == step:
                run.add(entry["id"], **random_request(entry, run.scheduler.config, run.rng))
        aborts = workload["aborts"].get(str(step), [])
        under_way = run.rng.random() < 0.5
        run.abort([] if under_way else aborts)
        run.step(aborts=aborts if under_way else [])
        step += 1
        assert step < 20_000, "the workload does not end"
    run.finish()


def configs_of(workload: dict[str, Any], num_drafts: int = 0, **settings: Any) -> tuple[SchedulerConfig, CacheConfig]:
    """Return a workload's configurations with these settings and room for this many drafts."""
    config = workload["config"]
    shared = {key: config[key] for key in SCHEDULER_KEYS}
    cache_config = CacheConfig(
        num_gpu_blocks=config["num_blocks"] + -(-num_drafts // config["block_size"]),
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
    )
    return SchedulerConfig(**(shared | settings)), cache_config


def random_request(entry: dict[str, Any], config: SchedulerConfig, rng: Random) -> dict[str, Any]:
    adapter = rng.randint(0, config.max_loras + 1) if config.max_loras else 0
    salt = rng.choice([None, None, "salt"])
    return {
        "prompt": [token % 4 for token in entry["prompt"]],
        "max_tokens": entry["max_tokens"],
        "arrival_time": entry["arrival_step"],
        "priority": entry["priority"],
        "stop_token_ids": rng.choice([(), (), (), (3,)]),
        "lora_request": LoRARequest(f"adapter-{adapter}", adapter, "/adapters") if adapter else None,
        "cache_salt": salt,
        "skip_reading_prefix_cache": rng.random() < 0.1,
        "sampling_params": (adapter, salt),
    }


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_workloads_with_drafts_adapters_watermark_and_all_else(seed: int) -> None:
    rng = Random(seed)
    workload = random_workload(rng)
    num_drafts = rng.choice([0, 1, 2, 4])
    num_lookahead = rng.choice([0, 0, 3])
    settings = {
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.5]),
        "max_loras": rng.choice([0, 1, 2]),
        "drafting": DraftingConfig(num_speculative_tokens=num_drafts, num_lookahead_tokens=num_lookahead),
        "static_batching": rng.random() < 0.2,
    }
    if rng.random() < 0.5:
        settings["max_num_batched_tokens"] = workload["config"]["max_model_len"]
    configs = configs_of(workload, num_drafts + num_lookahead, **settings)
    serve(Run(Scheduler(*configs), rng), workload)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_workloads_with_steps_in_flight(seed: int) -> None:
    """Two steps are in flight, with or without drafts, or three through pipeline stages, in pools
    that are too small.
    """
    rng = Random(seed)
    workload = random_workload(rng)
    through_stages = rng.random() < 0.3
    num_drafts = 0 if through_stages else rng.choice([0, 0, 1, 3])
    configs = configs_of(
        workload, 2 * num_drafts, max_num_batched_tokens=workload["config"]["max_model_len"],
        max_loras=rng.choice([0, 1, 2]), drafting=DraftingConfig(num_speculative_tokens=num_drafts),
        async_scheduling=not through_stages,
    )  # fmt: skip
    serve(Run(AsyncScheduler(*configs), rng, depth=3 if through_stages else 2), workload)
