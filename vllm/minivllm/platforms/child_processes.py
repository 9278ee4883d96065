"""What ranks and cores have in common as processes: how they are ended, and what is said of their end."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol


class ChildProcess(Protocol):
    """What is needed of a process that another one has started; `subprocess.Popen` has it."""

    @property
    def pid(self) -> int | str:
        """Names it in messages."""

    @property
    def returncode(self) -> int | None:
        """How it ended, if that is known."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, or raises `subprocess.TimeoutExpired`."""

    def kill(self) -> None:
        """Ends it at once."""


def wait_or_kill(processes: Sequence[ChildProcess], seconds: float) -> None:
    """Waits for processes that have been told to end, all of them for so long, and kills those that have not ended."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a machine that cannot be reached
                process.wait(seconds)


def how_it_ended(returncode: int) -> str:
    """The end of a process, as what follows its name in a sentence."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
