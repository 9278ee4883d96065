"""Timing: the median of several runs on the device's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


Clock = Callable[[], float]
"""Reads seconds, such as `time.perf_counter`, or `time.process_time` for one thread on a busy
machine.
"""


def median_seconds(
    function: Callable[[], object], *, repeats: int = 7, warmup: int = 2, device: torch.device | None = None,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Return the median seconds of a call, measured with CUDA events on a GPU (after a flush of its
    L2 cache), elsewhere with `clock`.
    """
    for _ in range(warmup):
        function()
    if device is not None and device.type == "cuda":
        return _median_cuda_seconds(function, repeats)
    return statistics.median(wall_seconds(function, clock) for _ in range(repeats))


def wall_seconds(function: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the seconds of one call, on the wall clock unless another clock is given."""
    start = clock()
    function()
    return clock() - start


def in_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each function's calls, interleaved in rounds so that changes in the
    machine's speed affect all of them equally.

    A warm-up round comes first. The clocks are those of `median_seconds`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(median_seconds(function, repeats=1, warmup=0, device=device, clock=clock))
    return seconds


def _median_cuda_seconds(function: Callable[[], object], repeats: int) -> float:
    import torch

    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.max()  # reads: what it left written, the L2 cache would write back while `function` runs
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
