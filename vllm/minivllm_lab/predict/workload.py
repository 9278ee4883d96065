"""Drive the scheduler with a workload and no model, one step at a time.

`tests/conformance/README.md` describes a workload. The tokens that requests "sample" are a hash of
their positions, so vLLM's scheduler can be driven with the same workload.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput

SCHEDULER_KEYS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "long_prefill_token_threshold",
    "policy",
    "enable_chunked_prefill",
)


Trace = list[dict[str, Any]]
"""A row for each step of a workload; see the README of `tests/conformance`."""


def recorded(folder: Path) -> Iterator[tuple[str, dict[str, Any], Trace]]:
    """Yield the name of each workload in a folder, the workload, and what vLLM's scheduler decided."""
    traces = json.loads(gzip.decompress((folder / "traces.json.gz").read_bytes()))
    for name in sorted(traces):
        yield name, json.loads((folder / f"{name}.json").read_text()), traces[name]


class Replay:
    """A workload and the scheduler that serves it. Each step is `arrive()`, then `run()`."""

    def __init__(self, workload: dict[str, Any], kind: Callable[..., Scheduler] = Scheduler) -> None:
        self.scheduler = make_scheduler(workload["config"], kind)
        self.step = 0
        self._requests = workload["requests"]
        self._aborts = workload["aborts"]
        self._last_arrival = max((entry["arrival_step"] for entry in self._requests), default=-1)

    @property
    def has_ended(self) -> bool:
        """Return whether all requests have arrived and finished."""
        return self.step > self._last_arrival and not self.scheduler.has_unfinished_requests()

    def arrive(self) -> None:
        """Add the requests that arrive before this step, and abort those whose clients leave."""
        for entry in self._requests:
            if entry["arrival_step"] == self.step:
                self.scheduler.add_request(make_request(entry))
        self.scheduler.finish_requests(self._aborts.get(str(self.step), []), RequestStatus.FINISHED_ABORTED)

    def run(self) -> dict[str, Any]:
        """Run the step and return its row of the trace."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        get_block_ids = scheduler.kv_cache_manager.get_block_ids
        row = {
            "step": self.step,
            "scheduled": [[request_id, count] for request_id, count in scheduled.items()],
            "preempted": sorted(output.preempted_req_ids),
            "blocks": {request_id: get_block_ids(request_id) for request_id in scheduled},
        }
        scheduler.update_from_output(output, _sample(scheduler, scheduled))
        row["running"] = [request.request_id for request in scheduler.running]
        row["waiting"] = [request.request_id for request in scheduler.waiting]
        row["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.step += 1
        return row


def next_token(request_id: str, position: int) -> int:
    """Return the token "sampled" at a position: 1 to 4000, the same on every machine."""
    digest = hashlib.sha256(f"{request_id}/{position}".encode()).digest()
    return int.from_bytes(digest[:2], "big") % 4000 + 1


def make_scheduler(config: dict[str, Any], kind: Callable[..., Scheduler] = Scheduler) -> Scheduler:
    """Return the scheduler of a workload's `config`."""
    return kind(
        SchedulerConfig(**{key: config[key] for key in SCHEDULER_KEYS}),
        CacheConfig(
            num_gpu_blocks=config["num_blocks"],
            block_size=config["block_size"],
            enable_prefix_caching=config["enable_prefix_caching"],
        ),
    )


def make_request(entry: dict[str, Any]) -> Request:
    """Return the request of a workload's `requests` entry."""
    return Request(
        entry["id"],
        entry["prompt"],
        max_tokens=entry["max_tokens"],
        arrival_time=entry["arrival_step"] + entry["order"] * 1e-6,
        priority=entry["priority"],
        ignore_eos=True,
    )


def _sample(scheduler: Scheduler, scheduled: dict[str, int]) -> ModelRunnerOutput:
    requests = (scheduler.requests[request_id] for request_id in scheduled)
    return ModelRunnerOutput(
        {
            request.request_id: [next_token(request.request_id, request.num_tokens)]
            for request in requests
            if request.num_computed_tokens == request.num_tokens
        }
    )
