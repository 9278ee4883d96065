"""Objects for the rank processes of `test_rank_processes.py` and `test_executors.py`: no model, and
every kind of failure.
"""

import os
import signal
import time
from pathlib import Path

from minivllm.errors import LostPeerError, MinivllmError


class RankDouble:
    """A rank's object that fails as its calls tell it to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0
        self.left = False

    def reset(self) -> None:
        self.calls, self.left = 0, False

    def leave_group(self) -> None:
        self.left = True

    def state(self) -> tuple[int, bool]:
        return self.calls, self.left

    def who(self, *arguments: object) -> tuple:
        self.calls += 1
        return self.rank, self.calls, *arguments

    def fail(self, rank: int) -> None:
        """Raise on the rank; the others notice it and report first."""
        if self.rank == rank:
            time.sleep(0.2)
            raise KeyError("a bug")
        raise LostPeerError("somebody is gone")

    def fail_alone(self, rank: int) -> None:
        """Raise on the rank; the others succeed."""
        if self.rank == rank:
            raise KeyError("a bug")

    def fail_and_be_missed(self, rank: int) -> None:
        """Raise on the rank, while the others wait for it forever."""
        if self.rank == rank:
            raise KeyError("a bug")
        time.sleep(1000)

    def run_out_of_memory(self) -> None:
        raise MemoryError

    def refuse(self, rank: int) -> None:
        if self.rank == rank:
            raise MinivllmError("this cannot be")

    def be_killed(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    def be_killed_and_missed(self, rank: int, words: str) -> None:
        """Kill the rank; the others report what they noticed before its death is noticed."""
        if self.rank == rank:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        raise LostPeerError(words)

    def lose_a_peer(self, rank: int, words: str) -> None:
        """Report a lost peer on the rank; the others succeed."""
        if self.rank == rank:
            raise LostPeerError(words)

    def size_of(self, data: bytes) -> int:
        return len(data)

    def zeros(self, size: int) -> bytes:
        return bytes(size)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_for(self, path: str, seconds: float) -> bool:
        """Wait until this file exists."""
        until = time.monotonic() + seconds
        while not (result := Path(path).exists()) and time.monotonic() < until:
            time.sleep(0.01)
        return result


def double(rank: int) -> RankDouble:
    return RankDouble(rank)


def refusing_double(rank: int) -> RankDouble:
    if rank == 1:
        raise MinivllmError("no such model")
    time.sleep(1000)
    return RankDouble(rank)


def leaving_double(rank: int) -> RankDouble:
    if rank == 1:
        os._exit(3)
    time.sleep(1000)
    return RankDouble(rank)


class Ending:
    """A rank's object that leaves a file when it shuts down, after `seconds`."""

    def __init__(self, folder: str, seconds: float, rank: int) -> None:
        self.note, self.seconds = Path(folder) / str(rank), seconds

    def shutdown(self) -> None:
        time.sleep(self.seconds)
        self.note.touch()
