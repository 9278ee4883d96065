"""Stop the processes of ranks and cores, and describe how they ended."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol


class ChildProcess(Protocol):
    """The interface of a child process; `subprocess.Popen` satisfies it."""

    @property
    def pid(self) -> int | str:
        """The process's id, or its name in messages if it has none."""
        ...

    @property
    def returncode(self) -> int | None:
        """How the process ended, or None if that is not known."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, or raise `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


def wait_or_kill(processes: Sequence[ChildProcess], seconds: float) -> None:
    """Wait up to `seconds` for processes that have been asked to end, then kill those that are
    still running.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a machine that cannot be reached
                process.wait(seconds)


def how_it_ended(returncode: int) -> str:
    """Return a phrase that says how a process ended and follows its name in a sentence."""
    if returncode < 0:  # minus the signal's number
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
