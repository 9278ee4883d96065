"""Time a scheduler, ours or vLLM's, for `benchmarks/scheduler.py`: both have the same two methods.
This needs no packages.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any


def step_seconds(scheduler: Any, sampled: Callable[[list[str]], Any]) -> tuple[float, float]:
    """Return the seconds of `schedule` and of `update_from_output` in one step; `sampled` stands in
    for the model.
    """
    start = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    answer = sampled(list(output.num_scheduled_tokens))
    returned = time.thread_time()
    scheduler.update_from_output(output, answer)
    return scheduled - start, time.thread_time() - returned


def fastest_run(scheduler: Any, sampled: Callable[[list[str]], Any], steps: int, repeats: int) -> dict[str, float]:
    """Return the mean microseconds of a step in the fastest of `repeats` runs of `steps` steps,
    after one step for the prompts.
    """
    step_seconds(scheduler, sampled)
    num_requests = len(scheduler.running)
    runs: list[tuple[float, float]] = []
    for _ in range(repeats):
        halves = [step_seconds(scheduler, sampled) for _ in range(steps)]
        runs.append((statistics.fmean(s for s, _ in halves) * 1e6, statistics.fmean(u for _, u in halves) * 1e6))
    assert len(scheduler.running) == num_requests
    schedule, update = min(runs, key=sum)
    return {"schedule_us": round(schedule, 1), "update_us": round(update, 1), "step_us": round(schedule + update, 1)}
