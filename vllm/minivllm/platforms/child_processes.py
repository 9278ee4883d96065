"""Start the processes of ranks and cores, stop them, and describe how they ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def start_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a Python process on this machine that runs `serve(socket, *arguments)` of a module
    (`child_main.py`). Return our end of the socket, which hangs up when the process ends; the
    process ends when ours is closed, or with this process.
    """
    own_end, child_end = socket.socketpair()
    with child_end:  # close our copy, so that the socket hangs up when the process ends
        script = str(Path(__file__).with_name("child_main.py"))
        fd = child_end.fileno()
        command = [sys.executable, "-P", script, str(fd), str(os.getpid()), json.dumps(list(map(str, sys.path)))]
        # A terminal sends Ctrl-C to its whole foreground process group. Each process gets its own
        # session, so that only this one receives it.
        process = subprocess.Popen(
            [*command, module, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env=environment,
            start_new_session=True,
        )
    return own_end, process


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
