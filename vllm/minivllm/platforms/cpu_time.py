"""What this process's threads got of the processor: the time they ran, and the time they waited for a core."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TASKS = Path("/proc/self/task")
STAT = Path("/proc/stat")
NANOSECONDS = 1e-9
STEAL = 8
"""Column of /proc/stat's first line: time that a virtual machine was ready to run and its host ran something else."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds that threads `ran`, and `waited`: ready to run, while something else had the core."""

    ran: float
    waited: float

    @property
    def waited_share(self) -> float:
        """Of the time that the threads wanted a core, the share that they had none. 0 on an idle machine."""
        wanted = self.ran + self.waited
        return self.waited / wanted if wanted > 0 else 0.0


ThreadTimes = dict[int, CpuTimes]
"""By thread id, since the thread began."""


def thread_times(tasks: Path = TASKS) -> ThreadTimes:
    """The times of every thread of this process, from Linux's run queue; empty where the system does not say."""
    times = {}
    try:
        names = os.listdir(tasks)
    except OSError:
        return {}
    for name in names:
        try:
            with open(f"{tasks}/{name}/schedstat", "rb", buffering=0) as file:
                ran, waited, _ = file.read(64).split()
        except (OSError, ValueError):  # the thread has just ended, or the kernel does not count
            continue
        times[int(name)] = CpuTimes(int(ran) * NANOSECONDS, int(waited) * NANOSECONDS)
    return times


def between(before: ThreadTimes, after: ThreadTimes) -> CpuTimes:
    """What passed from one reading to the next, over the threads that are there at the end."""
    nothing = CpuTimes(0.0, 0.0)
    earlier = [before.get(thread, nothing) for thread in after]
    return CpuTimes(
        sum(one.ran for one in after.values()) - sum(one.ran for one in earlier),
        sum(one.waited for one in after.values()) - sum(one.waited for one in earlier),
    )


def stolen_seconds(stat: Path = STAT) -> float:
    """Seconds, over all cores since the start, that this machine's host gave to other machines; 0 where unknown."""
    try:
        return int(stat.read_text().split(maxsplit=STEAL + 1)[STEAL]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
