"""What the scheduler itself costs: time of one `schedule()` and `update_from_output()`, with nothing but decodes.

    uv run python benchmarks/scheduler.py

No model runs. Prompt lengths are staggered, so that every step some requests fill a block, take a new one and hash the
old. Processor time, not the wall clock, and the fastest of several runs: what else the machine does only adds to it.
The table is followed by one line of JSON.
"""

import argparse
import json
import statistics
import time

from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.lab.cli import Parser, run
from minivllm.lab.results import record, write_json
from minivllm.lab.tables import table
from minivllm.scheduler_config import CacheConfig, SchedulerConfig

BATCHES = (16, 64, 256, 1024)
BLOCK_SIZE = 16
STEPS = 4 * BLOCK_SIZE


def decoding_scheduler(num_requests: int, num_steps: int, enable_prefix_caching: bool) -> Scheduler:
    """A scheduler with `num_requests` running requests, their prompts computed, and room for `num_steps` more steps."""
    blocks_per_request = 3 + -(-num_steps // BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=num_requests * 2 * BLOCK_SIZE,
            max_model_len=blocks_per_request * BLOCK_SIZE,
        ),
        CacheConfig(
            num_gpu_blocks=1 + num_requests * blocks_per_request,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=enable_prefix_caching,
        ),
    )
    for index in range(num_requests):
        length = BLOCK_SIZE + index % BLOCK_SIZE
        prompt = [index * length + position for position in range(length)]
        scheduler.add_request(Request(f"request-{index}", prompt, max_tokens=num_steps + BLOCK_SIZE))
    step_seconds(scheduler)
    return scheduler


def step_seconds(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds that `schedule` and `update_from_output` take in one step; every request samples one token between."""
    start = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    sampled = ModelRunnerOutput({request_id: [index] for index, request_id in enumerate(output.num_scheduled_tokens)})
    returned = time.thread_time()
    scheduler.update_from_output(output, sampled)
    return scheduled - start, time.thread_time() - returned


def measure(num_requests: int, repeats: int, enable_prefix_caching: bool) -> dict[str, float]:
    """Microseconds a step: the means over `STEPS` steps in the fastest of `repeats` runs."""
    scheduler = decoding_scheduler(num_requests, repeats * STEPS, enable_prefix_caching)
    runs: list[tuple[float, float]] = []
    for _ in range(repeats):
        halves = [step_seconds(scheduler) for _ in range(STEPS)]
        runs.append((statistics.fmean(s for s, _ in halves) * 1e6, statistics.fmean(u for _, u in halves) * 1e6))
    assert len(scheduler.running) == num_requests
    schedule, update = min(runs, key=sum)
    return {"schedule_us": round(schedule, 1), "update_us": round(update, 1), "step_us": round(schedule + update, 1)}


def main(arguments: argparse.Namespace) -> None:
    """Measures all batch sizes, with the prefix cache on."""
    figures = {str(batch): measure(batch, arguments.repeats, True) for batch in BATCHES}
    for batch in BATCHES:
        figures[str(batch)]["step_us_no_prefix_cache"] = measure(batch, arguments.repeats, False)["step_us"]
    rows = [
        (
            batch,
            figures[str(batch)]["schedule_us"],
            figures[str(batch)]["update_us"],
            figures[str(batch)]["step_us"],
            f"{figures[str(batch)]['step_us'] / batch:.2f}",
            figures[str(batch)]["step_us_no_prefix_cache"],
        )
        for batch in BATCHES
    ]
    columns = ("running requests", "schedule µs", "update µs", "step µs", "µs a request", "step µs, no prefix cache")
    table("The scheduler's own time per decode step", columns, rows)
    if arguments.json:
        write_json(arguments.json, "scheduler", figures)
    print(json.dumps(record("scheduler", figures)))


if __name__ == "__main__":
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help=f"the fastest of this many runs of {STEPS} steps")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    run(main, parser)
