"""Drive the scheduler with a workload and no model, and print what it decides at each step.

    uv run python tests/conformance/replay.py WORKLOAD.json

README.md beside this file describes the workload and the trace.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.cli import Parser

SCHEDULER_KEYS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "long_prefill_token_threshold",
    "policy",
    "enable_chunked_prefill",
)


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


def run_step(scheduler: Scheduler, step: int, arrivals: list[Request], aborts: list[str]) -> dict[str, Any]:
    """Run one step of a workload and return its row of the trace."""
    for request in arrivals:
        scheduler.add_request(request)
    scheduler.finish_requests(aborts, RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    row = {
        "step": step,
        "scheduled": [[request_id, count] for request_id, count in output.num_scheduled_tokens.items()],
        "preempted": sorted(output.preempted_req_ids),
        "blocks": {
            request_id: scheduler.kv_cache_manager.get_block_ids(request_id)
            for request_id in output.num_scheduled_tokens
        },
    }
    scheduler.update_from_output(output, _sample(scheduler, output.num_scheduled_tokens))
    row["running"] = [request.request_id for request in scheduler.running]
    row["waiting"] = [request.request_id for request in scheduler.waiting]
    row["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return row


def replay(workload: dict[str, Any], kind: Callable[..., Scheduler] = Scheduler) -> list[dict[str, Any]]:
    """Return the trace of a whole workload, from step 0 until all requests have arrived and
    finished.
    """
    scheduler = make_scheduler(workload["config"], kind)
    entries = workload["requests"]
    last_arrival = max((entry["arrival_step"] for entry in entries), default=-1)
    steps: list[dict[str, Any]] = []
    while len(steps) <= last_arrival or scheduler.has_unfinished_requests():
        step = len(steps)
        arrivals = [make_request(entry) for entry in entries if entry["arrival_step"] == step]
        steps.append(run_step(scheduler, step, arrivals, workload["aborts"].get(str(step), [])))
    return steps


def _sample(scheduler: Scheduler, scheduled: dict[str, int]) -> ModelRunnerOutput:
    requests = (scheduler.requests[request_id] for request_id in scheduled)
    return ModelRunnerOutput(
        {
            request.request_id: [next_token(request.request_id, request.num_tokens)]
            for request in requests
            if request.num_computed_tokens == request.num_tokens
        }
    )


def main() -> int:
    """Print the trace of the workload that the command line names."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path)
    path = parser.parse_args().workload
    try:
        steps = replay(json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    json.dump({"steps": steps}, sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
