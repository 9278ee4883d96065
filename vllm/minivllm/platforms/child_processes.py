"""Ending the processes of ranks and cores, and describing their end in messages."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol


class ChildProcess(Protocol):
    """The interface of a process that another one has started; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int | str:
        """Return what names the process in messages."""
        ...

    @property
    def returncode(self) -> int | None:
        """Return how the process ended, or None if that is not known."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, or raise `subprocess.TimeoutExpired`."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...


def wait_or_kill(processes: Sequence[ChildProcess], seconds: float) -> None:
    """Wait up to `seconds` for processes that have been told to end, then kill those that still
    run.
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
    """Describe the end of a process, as what follows its name in a sentence."""
    if returncode < 0:  # minus the signal's number
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
