"""Detect whether other work kept the machine busy during a measurement, so that a script then
draws no conclusions.

    control = Control()
    with control.watch():
        found = measure_something()
    closing("a counted conclusion", Timed("one from timings"), disturbance=control.disturbance())
    keep(..., disturbance=control.record())

Three signs, over all watched parts. `waited`: time that threads waited for a core that something
else was using. `stolen`: time that the host gave to another virtual machine. `slowdown`: a small
fixed piece of work is timed before and after each part; this is its slowest time over its fastest.
The first two need Linux; the third works everywhere.

Where a part keeps the cores busy with processes of its own, such as a server and its clients,
threads always wait. Then they are watched during the fixed work only: `Control(loads_cores=True)`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from minivllm.platforms.cpu_time import CpuTimes, ThreadTimes, between, stolen_seconds, thread_times

WAITED_LIMIT = 0.10
STOLEN_LIMIT = 0.05
SLOWDOWN_LIMIT = 1.5  # a shared machine's clock alone changes by a third
PIECES = 5


def fixed_work() -> None:
    """Do about 5 ms of arithmetic on one core, long enough to be interrupted by other busy
    processes.
    """
    total = 0
    for number in range(150_000):
        total += number & 7


class Disturbance(NamedTuple):
    """Disturbance of the watched parts: two fractions of time, and the control's slowest reading
    over its fastest.
    """

    waited: float
    stolen: float
    slowdown: float

    def __str__(self) -> str:
        """Return the signs that exceed their limits, in words; empty if there are none."""
        words = []
        if self.waited > WAITED_LIMIT:
            words.append(f"its threads waited {self.waited:.0%} of the time for a core")
        if self.stolen > STOLEN_LIMIT:
            words.append(f"its host gave {self.stolen:.0%} of the time to other machines")
        if self.slowdown > SLOWDOWN_LIMIT:
            words.append(f"the same work took {self.slowdown:.1f} times as long from one part to the next")
        return ", ".join(words)


class Control:
    """A watch over parts of a script. Its sources of readings can be replaced for tests."""

    def __init__(
        self, work: Callable[[], object] = fixed_work, clock: Callable[[], float] = time.perf_counter,
        threads: Callable[[], ThreadTimes] = thread_times, stolen: Callable[[], float] = stolen_seconds,
        cores: int | None = None, loads_cores: bool = False,
    ) -> None:  # fmt: skip
        self.loads_cores = loads_cores
        self.work, self.clock, self.threads, self.stolen = work, clock, threads, stolen
        self.cores = cores or os.cpu_count() or 1
        self.readings: list[float] = []  # seconds of the fixed work
        self.parts: list[tuple[float, CpuTimes, float]] = []  # seconds, of the threads, stolen

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch a part that measures. Adds about 50 ms."""
        first = self._read()
        threads, stolen, start = self.threads(), self.stolen(), self.clock()
        yield
        seconds, stolen, whole = self.clock() - start, self.stolen() - stolen, between(threads, self.threads())
        last = self._read()
        beside = CpuTimes(first.ran + last.ran, first.waited + last.waited)
        self.parts.append((seconds, beside if self.loads_cores else whole, stolen))

    def figures(self) -> Disturbance:
        """Return the disturbance over all parts together."""
        seconds = sum(part[0] for part in self.parts) or math.inf
        of_threads = CpuTimes(sum(part[1].ran for part in self.parts), sum(part[1].waited for part in self.parts))
        slowdown = max(self.readings) / min(self.readings) if self.readings else 1.0
        stolen = sum(part[2] for part in self.parts) / (seconds * self.cores)
        return Disturbance(of_threads.waited_share, stolen, slowdown)

    def disturbance(self) -> str:
        """Return what disturbed the parts, in words for `closing`; empty if nothing did."""
        return str(self.figures())

    def record(self) -> dict[str, float]:
        """Return the disturbance as numbers for a results file."""
        return {name: round(value, 3) for name, value in self.figures()._asdict().items()}

    def _read(self) -> CpuTimes:
        """Time the fixed work; return the CPU times of the threads meanwhile."""
        pieces, threads = [], self.threads()
        for _ in range(PIECES):
            start = self.clock()
            self.work()
            pieces.append(self.clock() - start)
        self.readings.append(statistics.median(pieces))
        return between(threads, self.threads())
