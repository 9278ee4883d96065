"""CPU time of this process's threads: how long they ran, and how long they waited for a core."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")
STAT = Path("/proc/stat")
NANOSECONDS = 1e-9
# Column of /proc/stat's first line: time in which a virtual machine was ready but its host ran
# something else.
STEAL = 8


@dataclass(frozen=True)
class CpuTimes:
    """Seconds that threads `ran`, and seconds that they `waited`: ready to run while something else
    had the core.
    """

    ran: float
    waited: float

    @property
    def waited_share(self) -> float:
        """The share of the time in which threads wanted a core that they spent waiting for one: 0
        on an idle machine.
        """
        total = self.ran + self.waited
        return self.waited / total if total > 0 else 0.0


# Times by thread id, since each thread started.
ThreadTimes = dict[int, CpuTimes]


def thread_times(tasks: Path = TASKS) -> ThreadTimes:
    """Return the times of every thread of this process, from Linux's scheduler statistics; empty if
    unavailable.
    """
    times = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return {}
    for name in names:
        try:
            with open(f"{tasks}/{name}/schedstat", "rb", buffering=0) as file:
                ran, waited, _ = file.read(64).split()  # in ns; the third is the number of time slices
        except (OSError, ValueError):  # the thread has just ended, or the kernel keeps no such statistics
            continue
        times[int(name)] = CpuTimes(int(ran) * NANOSECONDS, int(waited) * NANOSECONDS)
    return times


def between(before: ThreadTimes, after: ThreadTimes) -> CpuTimes:
    """Return the times between two readings, summed over the threads that exist at the second."""
    ran = waited = 0.0
    for thread, times in after.items():
        earlier = before.get(thread, CpuTimes(0.0, 0.0))  # a thread that has started since
        ran += times.ran - earlier.ran
        waited += times.waited - earlier.waited
    return CpuTimes(ran, waited)


def stolen_seconds(stat: Path = STAT) -> float:
    """Return the seconds since boot, over all cores, that the host gave to other virtual machines;
    0 if unknown.
    """
    try:
        return int(stat.read_text().split(maxsplit=STEAL + 1)[STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
