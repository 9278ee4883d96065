"""Record what vLLM's own scheduler decides on a workload, in the format that replay.py prints.

    python tests/conformance/record.py WORKLOAD.json MODEL_DIR > TRACE.json
    python tests/conformance/record.py FOLDER MODEL_DIR --release 0.32.0 > TRACES.json

This needs vLLM, which no test does: README.md says how to install enough of it. No model runs;
MODEL_DIR is any directory with a `config.json`, because vLLM requires one. Of a folder every workload
is recorded; `tools/drift.py` does that with releases other than 0.33.0.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# Where only the Python files of the wheel are installed, vLLM finds no platform by itself.
vllm.platforms.current_platform = CpuPlatform()

from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from minivllm_lab.predict.workload import SCHEDULER_KEYS, drafts_after, sampled  # noqa: E402
from vllm import __version__  # noqa: E402

VERSION = "0.33.0"


def make_scheduler(config: dict[str, Any], model: Path) -> Scheduler:
    """Return vLLM's scheduler with one KV-cache group of full attention, no asynchronous
    scheduling, and defaults elsewhere.
    """
    cache_config = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"])
    cache_config.num_gpu_blocks = config["num_blocks"]
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=config["max_model_len"]
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        speculative_config=_speculative_config(config, model_config),
        scheduler_config=SchedulerConfig(
            **{key: config[key] for key in SCHEDULER_KEYS}, is_encoder_decoder=False, async_scheduling=False
        ),
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config["block_size"],
    )


def _speculative_config(config: dict[str, Any], model_config: ModelConfig) -> SpeculativeConfig | None:
    """Return the settings for drafts; the drafts themselves come from the workload, not from n-grams."""
    if not config.get("num_speculative_tokens"):
        return None
    return SpeculativeConfig(
        method="ngram", num_speculative_tokens=config["num_speculative_tokens"], prompt_lookup_max=2,
        prompt_lookup_min=1, target_model_config=model_config, target_parallel_config=ParallelConfig(),
    )  # fmt: skip


def make_request(entry: dict[str, Any], block_size: int) -> Request:
    """Return the request of a workload's `requests` entry."""
    return Request(
        request_id=entry["id"], prompt_token_ids=entry["prompt"],
        sampling_params=SamplingParams(max_tokens=entry["max_tokens"], ignore_eos=True, temperature=0.0),
        pooling_params=None, arrival_time=entry["arrival_step"] + entry["order"] * 1e-6, priority=entry["priority"],
        block_hasher=get_request_block_hasher(block_size, sha256),
    )  # fmt: skip


def run_step(scheduler: Scheduler, step: int, arrivals: list[Request], aborts: list[str]) -> dict[str, Any]:
    """Run one step of a workload and return its row of the trace."""
    for request in arrivals:
        scheduler.add_request(request)
    for request_id in aborts:
        if request_id in scheduler.requests:
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
    output = scheduler.schedule()
    scheduled = output.num_scheduled_tokens
    row = {
        "step": step,
        "scheduled": [[request_id, count] for request_id, count in scheduled.items()],
        "preempted": sorted(output.preempted_req_ids or ()),
        "blocks": {request_id: scheduler.kv_cache_manager.get_block_ids(request_id)[0] for request_id in scheduled},
    }
    scheduler.update_from_output(output, _sample(scheduler, list(scheduled), output.scheduled_spec_decode_tokens))
    _propose(scheduler)
    row["running"] = [request.request_id for request in scheduler.running]
    row["waiting"] = [request.request_id for request in _in_queue_order(scheduler)]
    row["free"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return row


def record(workload: dict[str, Any], model: Path) -> list[dict[str, Any]]:
    """Return the trace of a whole workload."""
    config, entries = workload["config"], workload["requests"]
    init_none_hash(sha256)
    scheduler = make_scheduler(config, model)
    last_arrival = max((entry["arrival_step"] for entry in entries), default=-1)
    steps: list[dict[str, Any]] = []
    while len(steps) <= last_arrival or scheduler.has_unfinished_requests():
        step = len(steps)
        arrivals = [make_request(entry, config["block_size"]) for entry in entries if entry["arrival_step"] == step]
        steps.append(run_step(scheduler, step, arrivals, workload["aborts"].get(str(step), [])))
    return steps


def _propose(scheduler: Scheduler) -> None:
    if not scheduler.num_spec_tokens:
        return
    drafts = {
        request.request_id: drafts_after(request.request_id, request.num_tokens, scheduler.num_spec_tokens)
        for request in scheduler.running
    }
    scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))


def _sample(scheduler: Scheduler, request_ids: list[str], drafts: dict[str, list[int]]) -> ModelRunnerOutput:
    requests = [scheduler.requests[request_id] for request_id in request_ids]
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[
            sampled(request.request_id, request.num_tokens, drafts.get(request.request_id, ()))
            if request.num_computed_tokens >= request.num_tokens
            else []
            for request in requests
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _in_queue_order(scheduler: Scheduler) -> list[Request]:
    waiting = list(scheduler.waiting)
    if scheduler.scheduler_config.policy == "priority":
        waiting.sort(key=lambda request: (request.priority, request.arrival_time, request.request_id))
    return waiting


def main() -> int:
    """Print the trace of the workload that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", type=Path, help="a workload, or a folder of them")
    parser.add_argument("model", type=Path)
    parser.add_argument("--release", default=VERSION, help="the release that this must be (default: %(default)s)")
    arguments = parser.parse_args()
    if not __version__.startswith(arguments.release):
        print(f"this is vLLM {__version__}, not {arguments.release}", file=sys.stderr)
        return 2
    is_folder = arguments.workload.is_dir()
    files = sorted(arguments.workload.glob("w*.json")) if is_folder else [arguments.workload]
    traces = {file.stem: record(json.loads(file.read_text()), arguments.model) for file in files}
    recorded = {"traces": traces} if is_folder else {"steps": traces[arguments.workload.stem]}
    json.dump({"vllm": arguments.release} | recorded, sys.stdout, separators=(",", ":"))
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
