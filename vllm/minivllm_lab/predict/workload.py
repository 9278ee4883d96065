"""Drive the scheduler with a workload and no model, one step at a time.

`tests/conformance/README.md` describes a workload. The tokens that requests "sample" are a hash of
their positions, so vLLM's scheduler can be driven with the same workload.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput

SCHEDULER_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold", "policy",
    "enable_chunked_prefill",
)  # fmt: skip


Trace = list[dict[str, Any]]
"""A row for each step of a workload; see the README of `tests/conformance`."""


def recorded(folder: Path) -> Iterator[tuple[str, dict[str, Any], Trace]]:
    """Yield the name of each workload in a folder, the workload, and what vLLM's scheduler decided."""
    traces = json.loads(gzip.decompress((folder / "traces.json.gz").read_bytes()))
    for name in sorted(traces):
        yield name, json.loads((folder / f"{name}.json").read_text()), traces[name]


class Replay:
    """A workload and the scheduler that serves it, a new one with `configs(workload)`. Each step is
    `arrive()`, then `run()`.
    """

    def __init__(self, workload: dict[str, Any], scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.step = 0
        self._requests = workload["requests"]
        self._aborts = workload["aborts"]
        self._num_drafts = workload["config"].get("num_speculative_tokens", 0)
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
        drafts = output.scheduled_spec_decode_tokens
        scheduler.update_from_output(output, _sample(scheduler, scheduled, drafts))
        self._propose()
        row["running"] = [request.request_id for request in scheduler.running]
        row["waiting"] = [request.request_id for request in scheduler.waiting]
        row["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.step += 1
        return row

    def _propose(self) -> None:
        """Give every running request drafts to verify in the next step, if the workload has any."""
        if self._num_drafts:
            self.scheduler.update_draft_token_ids(
                {
                    request.request_id: drafts_after(request.request_id, request.num_tokens, self._num_drafts)
                    for request in self.scheduler.running
                }
            )


def next_token(request_id: str, position: int) -> int:
    """Return the token "sampled" at a position: 1 to 4000, the same on every machine."""
    digest = hashlib.sha256(f"{request_id}/{position}".encode()).digest()
    return int.from_bytes(digest[:2], "big") % 4000 + 1


def drafts_after(request_id: str, position: int, most: int) -> list[int]:
    """Return up to `most` drafts for the tokens after a position; three of four are right."""
    digest = hashlib.sha256(f"{request_id}/drafts/{position}".encode()).digest()
    drafts = [next_token(request_id, position + place) for place in range(digest[0] % (most + 1))]
    return [token if digest[1 + place] % 4 else token % 4000 + 1 for place, token in enumerate(drafts)]


def sampled(request_id: str, position: int, drafts: Sequence[int]) -> list[int]:
    """Return the tokens that a step samples: the drafts up to the first wrong one, and one more."""
    tokens = [next_token(request_id, position + place) for place in range(len(drafts) + 1)]
    wrong = (place for place, draft in enumerate(drafts) if draft != tokens[place])
    return tokens[: next(wrong, len(drafts)) + 1]


def configs(workload: dict[str, Any]) -> tuple[SchedulerConfig, CacheConfig]:
    """Return the configs of the scheduler that a workload asks for."""
    config = workload["config"]
    drafting = DraftingConfig(num_speculative_tokens=config.get("num_speculative_tokens", 0))
    scheduler = SchedulerConfig(**{key: config[key] for key in SCHEDULER_KEYS}, drafting=drafting)
    return scheduler, CacheConfig(
        num_gpu_blocks=config["num_blocks"], block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
    )  # fmt: skip


def make_request(entry: dict[str, Any]) -> Request:
    """Return the request of a workload's `requests` entry."""
    return Request(
        entry["id"], entry["prompt"], max_tokens=entry["max_tokens"],
        arrival_time=entry["arrival_step"] + entry["order"] * 1e-6, priority=entry["priority"],
    )  # fmt: skip


def _sample(scheduler: Scheduler, scheduled: dict[str, int], drafts: Mapping[str, Sequence[int]]) -> ModelRunnerOutput:
    requests = (scheduler.requests[request_id] for request_id in scheduled)
    return ModelRunnerOutput(
        {
            request.request_id: sampled(request.request_id, request.num_tokens, drafts.get(request.request_id, ()))
            for request in requests
            if request.num_computed_tokens >= request.num_tokens
        }
    )
