"""Serve random workloads: the bookkeeping agrees, each step advances a request, all end, and no
token is wrong.

The model here is a function of the preceding tokens, and its keys and values are the prefixes
themselves. So a request gets the answer that it would get alone, however its prompt was chunked,
shared or preempted, and whatever was drafted.
"""

import hashlib
from dataclasses import dataclass
from random import Random
from typing import Any

from conformance.workloads import random_workload
from core.invariants import check_scheduler
from core.worker_double import WorkerDouble
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm_lab.predict.workload import SCHEDULER_KEYS

SEEDS = st.integers(0, 2**32)


def toy_model(token_ids: list[int]) -> int:
    """Return one of four tokens, determined by the last three, so that outputs share blocks."""
    return hashlib.sha256(bytes(token & 255 for token in token_ids[-3:])).digest()[0] % 4


@dataclass
class Run:
    """A workload under way, with everything checked at every step."""

    scheduler: Scheduler
    rng: Random

    def __post_init__(self) -> None:
        self.worker = WorkerDouble(self.scheduler.cache_config.block_size, toy_model)
        self.requests: dict[str, Request] = {}
        self.received: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)
        self.requests[request.request_id] = request
        self.received[request.request_id] = []

    def abort(self, request_ids: list[str]) -> None:
        for request_id in self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED):
            self.reasons[request_id] = "abort"

    def step(self, aborts_under_way: list[str]) -> None:
        unfinished = self.scheduler.has_unfinished_requests()
        output = self.scheduler.schedule()
        check_scheduler(self.scheduler, under_way=True)
        self.check_output(output, unfinished)
        sampled = self.worker.execute(output)
        self.abort(aborts_under_way)
        for engine_output in self.scheduler.update_from_output(output, sampled):
            self.receive(engine_output)
        self.scheduler.update_draft_token_ids(self.drafts(list(sampled.sampled_token_ids)))
        check_scheduler(self.scheduler)

    def check_output(self, output: SchedulerOutput, unfinished: bool) -> None:
        counts = output.num_scheduled_tokens
        assert all(count > 0 for count in counts.values())
        assert sum(counts.values()) == output.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens
        assert bool(counts) == unfinished, "a step in which nobody advances"
        assert not output.preempted_req_ids & set(counts)
        assert not (output.preempted_req_ids and output.scheduled_new_reqs), "admission in a step that preempted"

    def receive(self, engine_output: EngineCoreOutput) -> None:
        assert engine_output.new_token_ids
        assert engine_output.request_id not in self.reasons, "output of a request that has ended"
        self.received[engine_output.request_id] += engine_output.new_token_ids
        if engine_output.finish_reason is not None:
            self.reasons[engine_output.request_id] = engine_output.finish_reason

    def drafts(self, request_ids: list[str]) -> dict[str, list[int]]:
        """Guess some tokens for each request; the first ones are often right."""
        drafts = {}
        for request_id in request_ids:
            tokens = list(self.requests[request_id].all_token_ids)
            for _ in range(self.rng.randint(0, self.scheduler.drafting.num_speculative_tokens)):
                tokens.append(toy_model(tokens) if self.rng.random() < 0.7 else self.rng.randrange(4))
            drafts[request_id] = tokens[self.requests[request_id].num_tokens :]
        return drafts

    def check_end(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_usable_blocks
        for request_id, request in self.requests.items():
            expected = alone(request, self.scheduler.config.max_model_len)
            received = self.received[request_id]
            assert received == expected[: len(received)]
            assert len(received) == len(expected) or self.reasons[request_id] == "abort"


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
    entries = workload["requests"]
    last_arrival = max(entry["arrival_step"] for entry in entries)
    step = 0
    while step <= last_arrival or run.scheduler.has_unfinished_requests():
        for entry in entries:
            if entry["arrival_step"] == step:
                run.add(random_request(entry, run.scheduler.config, run.rng))
        aborts = workload["aborts"].get(str(step), [])
        under_way = run.rng.random() < 0.5
        run.abort([] if under_way else aborts)
        run.step(aborts if under_way else [])
        step += 1
        assert step < 20_000, "the workload does not end"
    run.check_end()


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


def random_request(entry: dict[str, Any], config: SchedulerConfig, rng: Random) -> Request:
    adapter = rng.randint(0, config.max_loras + 1) if config.max_loras else 0
    salt = rng.choice([None, None, "salt"])
    return Request(
        entry["id"],
        [token % 4 for token in entry["prompt"]],
        max_tokens=entry["max_tokens"],
        arrival_time=entry["arrival_step"],
        priority=entry["priority"],
        stop_token_ids=rng.choice([(), (), (), (3,)]),
        lora_request=LoRARequest(f"adapter-{adapter}", adapter, "/adapters") if adapter else None,
        cache_salt=salt,
        skip_reading_prefix_cache=rng.random() < 0.1,
        sampling_params=(adapter, salt),
    )


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
