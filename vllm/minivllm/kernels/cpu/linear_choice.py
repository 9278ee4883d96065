"""The choice of the faster form of each matmul on this CPU, by measurement.

Weights in panels (`panel_linear.py`) and `F.linear` differ by factors, either way: by processor, by
dtype, by shape, and by the number of rows. On AMD Zen 3, which has no bf16 instructions, panels win
at all of them; where the processor has matrix units (Intel's AMX), `F.linear` uses them for many
rows of bf16. So both are timed when a model is loaded, in turns, on its own shapes. A linear uses
panels up to a number of rows and `F.linear` above it. It keeps both layouts only if that makes its
matmuls 5 % faster in the mean.

The processor time of one thread counts, which other processes hardly change. The wall clock of two
threads took torch's form for 5 of 40 linears beside other busy processes, all of which are faster
in panels on a quiet machine (AMD Zen 4); the processor time for none.

`MINIVLLM_CPU_LINEAR`, "panels" or "torch", makes the choice instead of the clock.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.kernels.cpu.panel_linear import PanelLinear, can_pack
from minivllm.kernels.elementwise import silu_and_mul
from minivllm.logger import init_logger

logger = init_logger(__name__)

SETTING = "MINIVLLM_CPU_LINEAR"
ROWS = (1, 8, 64, 256)  # decodes of one request and of some; prompts
ROUNDS = 6
SECONDS = 0.08  # for one shape
LONGEST = 0.02  # for one call of each form
# What a choice must gain in the mean: of two layouts, since they take twice the memory; of torch
# alone, since a recorded step (`replay.py`) runs panels without Python between them.
BOTH_GAIN, TORCH_GAIN = math.log(1.05), math.log(1.1)

Seconds = Mapping[int, tuple[float, float]]  # by rows: in panels, and with F.linear


def most_rows_in_panels(weight: Tensor, gated: bool) -> float:
    """Return up to how many rows panels are the faster form for a weight: 0 for none, `math.inf`
    for all.

    Raises:
        MinivllmError: the setting is unknown.
    """
    setting = os.environ.get(SETTING) or "auto"
    if setting not in ("auto", "panels", "torch"):
        raise MinivllmError(f'{SETTING} is {setting!r}; it must be "auto", "panels" or "torch"')
    if setting == "torch" or not can_pack(weight):
        return 0
    if setting == "panels":
        return math.inf
    return _measured(tuple(weight.shape), weight.dtype, gated)


@functools.cache
def _measured(shape: tuple[int, int], dtype: torch.dtype, gated: bool) -> float:
    with one_thread():
        seconds = measure(torch.zeros(shape, dtype=dtype), gated)
    most_rows = best_threshold(seconds)
    text = "%s %s: in panels up to %s rows; seconds by rows, in panels and with torch: %s"
    logger.debug(text, dtype, shape, most_rows, seconds)
    return most_rows


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on the calling thread alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure(weight: Tensor, gated: bool, clock: Callable[[], float] = time.thread_time) -> Seconds:
    """Time both forms in turns, in rounds over all numbers of rows that do not take too long; keep
    each one's fastest call.
    """
    panels = PanelLinear(weight, gated=gated)

    def plain(x: Tensor) -> Tensor:
        out = F.linear(x, weight)
        return silu_and_mul(out) if gated else out

    start = clock()
    seconds: dict[int, tuple[float, float]] = {}
    for index in range(ROUNDS):
        for rows in ROWS if index == 0 else tuple(seconds):
            x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype)
            if index == 0:  # warm up
                panels(x)
                plain(x)
            times = tuple(_time(form, x, clock) for form in (panels, plain))
            best = seconds.get(rows, times)
            seconds[rows] = min(best[0], times[0]), min(best[1], times[1])
            if index == 0 and 4 * sum(times) > LONGEST:  # the next number of rows takes too long
                break
        if index and clock() - start > SECONDS:
            break
    return seconds


def _time(form: Callable[[Tensor], Tensor], x: Tensor, clock: Callable[[], float]) -> float:
    start = clock()
    form(x)
    return clock() - start


def best_threshold(seconds: Seconds) -> float:
    """Return the number of rows up to which panels are used if matmuls take this long."""
    costs = {0.0: _cost(seconds, 0) + TORCH_GAIN, math.inf: _cost(seconds, math.inf)}
    for below, above in itertools.pairwise(sorted(seconds)):
        costs[float(round(math.sqrt(below * above)))] = _cost(seconds, below) + BOTH_GAIN
    return min(costs, key=lambda rows: (costs[rows], -rows))


def _cost(seconds: Seconds, most_rows: float) -> float:
    """Return the mean logarithm of the time with panels up to `most_rows`, relative to the faster
    form.
    """
    chosen = {rows: times[0] if rows <= most_rows else times[1] for rows, times in seconds.items()}
    return sum(math.log(chosen[rows] / min(times)) for rows, times in seconds.items()) / len(seconds)
