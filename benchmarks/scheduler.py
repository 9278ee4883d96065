"""Measure the scheduler's own cost: the time of one `schedule()` and `update_from_output()`, with
decodes only.

    uv run python benchmarks/scheduler.py     # beside vLLM's own scheduler where `make peers` has installed it

No model runs. Prompt lengths are staggered, so that in every step some requests fill a block, take
a new one and hash the old. Processor time counts, not the wall clock, and the fastest of several
runs, since the machine's other work only adds to it. The table is followed by one line of JSON.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from peer_process import ENGINES, VLLM_PYTHON
from scheduler_timing import fastest_run

from minivllm.config import EMBEDDED_MODEL, CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, table

BATCHES = (16, 64, 256)
BLOCK_SIZE = 16
STEPS = 4 * BLOCK_SIZE


def work_of(num_requests: int, repeats: int, enable_prefix_caching: bool) -> dict[str, Any]:
    """Return a work item whose requests all run after one step, with blocks for all later steps;
    `config` has the form that the traces use.
    """
    num_steps = repeats * STEPS
    blocks_per_request = 3 + -(-num_steps // BLOCK_SIZE)
    lengths = [BLOCK_SIZE + index % BLOCK_SIZE for index in range(num_requests)]
    return {
        "config": {
            "block_size": BLOCK_SIZE,
            "num_blocks": 1 + num_requests * blocks_per_request,
            "enable_prefix_caching": enable_prefix_caching,
            "max_num_seqs": num_requests,
            "max_num_batched_tokens": max(num_requests * 2 * BLOCK_SIZE, blocks_per_request * BLOCK_SIZE),
            "max_model_len": blocks_per_request * BLOCK_SIZE,
            "long_prefill_token_threshold": 0,
            "policy": "fcfs",
            "enable_chunked_prefill": True,
        },
        "prompts": [[(index * n + position) % 4096 for position in range(n)] for index, n in enumerate(lengths)],
        "max_tokens": num_steps + BLOCK_SIZE,
        "steps": STEPS,
        "repeats": repeats,
    }


def scheduler_for(work: dict[str, Any]) -> Scheduler:
    """Return our scheduler with the work's requests."""
    config = work["config"]
    cache = CacheConfig(
        num_gpu_blocks=config["num_blocks"],
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
    )
    limits = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    scheduler = Scheduler(SchedulerConfig(**{name: config[name] for name in limits}), cache)
    for index, prompt in enumerate(work["prompts"]):
        scheduler.add_request(Request(f"request-{index}", prompt, max_tokens=work["max_tokens"]))
    return scheduler


def sampled(request_ids: list[str]) -> ModelRunnerOutput:
    """Return an output with one token for each request."""
    return ModelRunnerOutput({request_id: [index] for index, request_id in enumerate(request_ids)})


def measure_vllm(python: Path, works: list[dict[str, Any]]) -> dict[str, Any]:
    """Run the same works on vLLM's scheduler in its own environment; return its version, and the
    figures in the order of `works`.
    """
    asked = json.dumps({"model": str(EMBEDDED_MODEL), "works": works})
    with tempfile.TemporaryDirectory() as folder:  # not the repository, whose folder vllm/ would pose as the library
        command = [str(python), str(ENGINES / "vllm_scheduler.py")]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        said = done.stderr.strip() or f"exited with {done.returncode}"
        raise MinivllmError(f"vLLM's scheduler did not run: {said.splitlines()[-1]}")
    return json.loads(done.stdout)


def main(arguments: argparse.Namespace) -> None:
    """Measure all batch sizes, with the prefix cache and without: ours, vLLM's, and ours again."""
    cases = [(batch, caching) for batch in BATCHES for caching in (True, False)]
    works = [work_of(batch, arguments.repeats, caching) for batch, caching in cases]
    ours = [fastest_run(scheduler_for(work), sampled, work["steps"], work["repeats"]) for work in works]
    theirs: dict[str, Any] = {"version": None, "figures": [{}] * len(works)}
    python = Path(arguments.vllm_python).absolute()
    if python.exists():
        theirs = measure_vllm(python, works)
        again = [fastest_run(scheduler_for(work), sampled, work["steps"], work["repeats"]) for work in works]
        ours = [min(pair, key=lambda one: one["step_us"]) for pair in zip(ours, again, strict=True)]
    else:
        console.print(f"skipped: vLLM, which has no environment at {python.parent.parent} (run make peers)")
    figures: dict[str, Any] = {str(batch): {} for batch in BATCHES}
    rows = []
    for (batch, caching), mine, other in zip(cases, ours, theirs["figures"], strict=True):
        figures[str(batch)]["prefix_caching" if caching else "no_prefix_caching"] = {"minivllm": mine, "vllm": other}
        ratio = f"{other['step_us'] / mine['step_us']:.1f} ×" if other else "—"
        times = [f"{one:,.0f}" for one in (mine["schedule_us"], mine["update_us"], mine["step_us"])]
        theirs_us = f"{other['step_us']:,.0f}" if other else "—"
        each = f"{mine['step_us'] / batch:.2f}"
        rows.append((batch, "on" if caching else "off", *times, each, theirs_us, ratio))
    columns = ("running", "prefixes", "schedule", "update", "step", "per request", "vLLM's step", "vLLM's ÷ ours")
    table("A scheduler's own time per decode step, µs", columns, rows)
    report(record("scheduler", figures, vllm=theirs["version"]), arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument(
        "--repeats", type=positive_int, default=7, help=f"runs of {STEPS} steps, of which the fastest counts"
    )
    flags.add_argument("--vllm-python", default=VLLM_PYTHON, help="a Python with vLLM (default: of make peers)")
    return flags


if __name__ == "__main__":
    run(main, parser())
