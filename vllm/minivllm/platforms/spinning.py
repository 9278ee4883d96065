"""PyTorch's threads spin while they wait for one another; on a busy machine they should sleep instead.

After every operator OpenMP's threads spin for some milliseconds in the hope of more work. On an idle machine that is
the fastest way to wait. Beside other busy processes it burns the very time in which the thread that is waited for could
run, and the engine gets slower by a factor of three to ten.

How long they spin is read from the environment when the library is loaded, which is too late for a program that has
imported torch, and it is one value for quiet and busy times. But GNU's library spins only 100 turns while a process has
more OpenMP threads than cores (its manual says so under GOMP_SPINCOUNT). So a watcher looks ten times a second how long
this process's threads waited for a core; when that is much, it holds a second team of threads, which sleep and do
nothing but be counted, and lets it go when the machine is quiet again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

import torch

from minivllm.logger import init_logger
from minivllm.platforms.cpu_time import CpuTimes, ThreadTimes, between, thread_times
from minivllm.platforms.threads import parallel_region

logger = init_logger(__name__)

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Where one of these is set, a person has decided how threads wait."""

BUSY, QUIET = 0.20, 0.10
"""Shares of the wanted time that threads waited for a core: above the first they sleep, below the second they spin."""
WEIGHT = 0.3
"""Of the newest reading in the running mean: one hiccup changes nothing, 0.2 to 0.4 s beside others do."""
SECONDS, IDLE_SECONDS = 0.1, 0.5
LEAST_WANTED = 0.02
"""Seconds of a core: a process that wanted less between two readings is idle and learns nothing about the machine."""
LARGEST_COST = 0.01
"""Of one core: where there are so many threads that reading costs more, it is done less often."""


class ExtraTeam:
    """Threads that are only counted: while they are held, there are more OpenMP threads than cores."""

    def __init__(self) -> None:
        self._let_go: threading.Event | None = None

    @property
    def held(self) -> bool:
        """Whether they are there."""
        return self._let_go is not None

    def hold(self) -> None:
        """Start them. A team belongs to the thread that started it, and ends with it."""
        if self._let_go is None:
            self._let_go, ready = threading.Event(), threading.Event()
            threading.Thread(target=_hold, args=(ready, self._let_go), name="minivllm-team", daemon=True).start()
            ready.wait()

    def let_go(self) -> None:
        """End them."""
        if self._let_go is not None:
            self._let_go.set()
            self._let_go = None


def _hold(ready: threading.Event, let_go: threading.Event) -> None:
    region = parallel_region()
    assert region is not None
    region(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p), None, len(os.sched_getaffinity(0)) + 1, 0)
    ready.set()
    let_go.wait()


class Contention:
    """Whether others want the cores, from readings of this process's threads."""

    def __init__(self) -> None:
        self.share, self.busy = 0.0, False

    def take(self, passed: CpuTimes) -> bool:
        """Add what passed since the last reading; whether the machine is busy."""
        if passed.ran + passed.waited >= LEAST_WANTED:
            self.share += WEIGHT * (passed.waited_share - self.share)
            self.busy = self.share > (QUIET if self.busy else BUSY)
        return self.busy


class Watcher:
    """Holds the extra team while the machine is busy. What it reads can be replaced, for tests."""

    def __init__(self, team: ExtraTeam, read: Callable[[], ThreadTimes] = thread_times) -> None:
        self.team, self.read = team, read
        self.contention, self._before = Contention(), read()

    def look(self) -> float:
        """Read once and act; seconds until the next time."""
        start = time.thread_time()  # not the wall clock: on a busy machine most of that is waiting
        after = self.read()
        passed = between(self._before, after)
        self._before = after
        if self.contention.take(passed) != self.team.held:
            logger.debug("Threads waited %.0f%% of the time for a core", 100 * self.contention.share)
            (self.team.hold if self.contention.busy else self.team.let_go)()
        seconds = SECONDS if passed.ran + passed.waited >= LEAST_WANTED else IDLE_SECONDS
        return max(seconds, (time.thread_time() - start) / LARGEST_COST)

    def run(self) -> None:
        """Look for as long as the process lives."""
        pause = SECONDS
        while True:
            time.sleep(pause)
            pause = self.look()


_watched: set[int] = set()
"""Processes that have a watcher: this one's id, and after a fork the parent's."""


def limit_spinning() -> bool:
    """Have PyTorch's threads sleep while others want the cores. Once for a process; again does nothing.

    True where it takes effect: with GNU's OpenMP library on Linux, and several threads, unless the environment says how
    threads shall wait. LLVM's and Intel's library is asked to spin 1 ms instead of 200, if it has not started yet.
    """
    if any(name in os.environ for name in CHOICES) or torch.get_num_threads() == 1:
        return False
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    if not sys.platform.startswith("linux") or parallel_region() is None or not thread_times():
        return False
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=Watcher(ExtraTeam()).run, name="minivllm-watcher", daemon=True).start()
    return True
