"""Let PyTorch's threads sleep instead of spin while they wait for each other on a busy machine.

After every operator, OpenMP's threads spin for some milliseconds in the hope of more work. On an
idle machine that is the fastest way to wait. Next to other busy processes it burns the very time in
which the awaited thread could run, and the engine becomes three to ten times slower.

The library reads the spin time from the environment when it is loaded. Once torch is imported it is
too late to set, and one value must serve both quiet and busy times. But GNU's library spins for
only 100 iterations while a process has more OpenMP threads than cores (see GOMP_SPINCOUNT in its
manual). So a watcher checks twice a second how long this process's threads waited for a core. If
they waited too long, it starts a second team of threads, which sleep and only add to the count; it
ends the team when the machine is quiet again.
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

# If one of these is set, the user has already decided how threads wait.
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

# Thresholds of `waited_share`: above the first the threads sleep, below the second they spin.
BUSY, QUIET = 0.20, 0.10
# The weight of the newest reading: one hiccup changes nothing, one or two seconds of contention do.
WEIGHT = 0.3
# The time between two readings. Ten a second slowed the steps of a single request: by 5 % at least,
# 13 % in the median.
SECONDS = 0.5
# In CPU seconds: a process that wanted less between two readings is idle and learns nothing about
# the machine.
LEAST_WANTED = 0.02
# In cores: if a process has so many threads that the readings would cost more, they are taken less
# often.
LARGEST_COST = 0.01


class ExtraTeam:
    """A team of sleeping threads whose only purpose is their number: while it exists, there are
    more OpenMP threads than cores.
    """

    def __init__(self) -> None:
        self._let_go: threading.Event | None = None

    @property
    def held(self) -> bool:
        """Return whether the team exists."""
        return self._let_go is not None

    def hold(self) -> None:
        """Start the team. It belongs to the thread that started it, and ends with that thread."""
        if self._let_go is None:
            self._let_go = threading.Event()
            ready = threading.Event()
            threading.Thread(target=_hold, args=(ready, self._let_go), name="minivllm-team", daemon=True).start()
            ready.wait()

    def let_go(self) -> None:
        """Release the team."""
        if self._let_go is not None:
            self._let_go.set()
            self._let_go = None


def _hold(ready: threading.Event, let_go: threading.Event) -> None:
    region = parallel_region()
    assert region is not None
    # The team lives as long as the thread that made it, so the thread waits.
    region(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p), None, len(os.sched_getaffinity(0)) + 1, 0)
    ready.set()
    let_go.wait()


class Watcher:
    """A watcher that holds the extra team while other processes compete for the cores. Tests can
    replace `read`.
    """

    def __init__(self, team: ExtraTeam, read: Callable[[], ThreadTimes] = thread_times) -> None:
        self.team = team
        self.read = read
        self.share = 0.0
        self.busy = False
        self._before = read()

    def take(self, passed: CpuTimes) -> bool:
        """Add the times since the last reading; return whether the machine is busy."""
        if passed.ran + passed.waited >= LEAST_WANTED:
            # A running mean, which follows slowly.
            self.share += WEIGHT * (passed.waited_share - self.share)
            # Two thresholds, so that it does not flip back and forth.
            self.busy = self.share > (QUIET if self.busy else BUSY)
        return self.busy

    def look(self) -> float:
        """Take one reading and act on it; return the seconds until the next one."""
        start = time.thread_time()  # not wall time, most of which is waiting on a busy machine
        after = self.read()
        passed = between(self._before, after)
        self._before = after
        if self.take(passed) != self.team.held:
            logger.debug("Threads waited %.0f%% of the time for a core", 100 * self.share)
            (self.team.hold if self.busy else self.team.let_go)()
        return max(SECONDS, (time.thread_time() - start) / LARGEST_COST)

    def run(self) -> None:
        """Call `look` for as long as the process lives."""
        pause = SECONDS
        while True:
            time.sleep(pause)
            pause = self.look()


# Ids of processes that started a watcher: this one's and, after a fork, its parent's.
_watched: set[int] = set()


def limit_spinning() -> bool:
    """Make PyTorch's threads sleep while other processes want the cores. A second call in a process
    does nothing.

    Return whether it takes effect: with GNU's OpenMP library on Linux and several threads, unless
    the environment specifies how threads should wait. LLVM's and Intel's library is set to spin for
    1 ms instead of 200, unless it has already started.
    """
    if any(name in os.environ for name in CHOICES) or torch.get_num_threads() == 1:
        return False
    os.environ.setdefault("KMP_BLOCKTIME", "1")  # read when the library starts its first team
    if not sys.platform.startswith("linux") or parallel_region() is None or not thread_times():
        return False
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        threading.Thread(target=Watcher(ExtraTeam()).run, name="minivllm-watcher", daemon=True).start()
    return True
