"""Processes that all do what one process says, in the same order: how they start, answer, fail and end.

Each has a pipe; a call is pickled once and sent to all. Three promises:

- If one ends, by a signal or by an exception, the others are killed and the caller gets an error that says which and
  why. Where they wait for one another, the first to be heard of is often not the one that began: it says that it lost
  a peer (`LostPeerError`), and the others are asked before anyone is blamed.
- They end with the object that started them, with `shutdown`, and with the interpreter.
- They end with the process that started them, whatever kills it: a thread in each waits for just that.

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`MultiprocExecutor`, `WorkerProc`), where calls go round by a
ring in shared memory.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from minivllm.errors import LostPeerError, MinivllmError, WorkerDiedError

SECONDS_FOR_REPORTS = 1.0
"""When a rank has lost a peer, the others get so long to say what they saw."""
SECONDS_TO_LEAVE = 2.0
"""Ranks that are told to leave and do not are killed after this."""


@dataclass(frozen=True)
class Call:
    """Asks for `method(*arguments)` of every rank; rank 0 alone replies where `one_reply`."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    one_reply: bool


@dataclass(frozen=True)
class Reply:
    """What came of a call."""

    number: int
    value: Any


@dataclass(frozen=True)
class Failure:
    """A rank's last words. `refusal` is an error that a person can act on; `lost_peer`: another rank began."""

    text: str
    refusal: MinivllmError | None = None
    lost_peer: bool = False


class RankProcesses:
    """`size` processes; in rank r lives the object that `make(*arguments, r)` gave."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...], size: int) -> None:
        """Starts them, and waits until all are ready. `make` must be a function that a module names.

        Raises:
            MinivllmError: what a rank refuses.
            WorkerDiedError: a rank ended before it was ready.
        """
        self.size = size
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._numbers = itertools.count(1)
        self._ready = False
        self._dead: WorkerDiedError | None = None
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self.processes, self._pipes)
        try:
            for rank in range(size):
                self._start(make, (*arguments, rank), rank)
            self._replies(0, range(size))
        except BaseException:
            self.shutdown()
            raise
        self._ready = True

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What the method returns on every rank. Raises `WorkerDiedError`, at once, where a rank has ended."""
        return self._call(method, arguments, range(self.size))

    def call_for_one(self, method: str, *arguments: Any) -> Any:
        """As `call`, but only rank 0 is waited for: its result."""
        return self._call(method, arguments, (0,))[0]

    def shutdown(self) -> None:
        """Ends them. No call can be made after it; a second time it does nothing."""
        self._dead = self._dead or WorkerDiedError("the engine has been shut down")
        self._finalizer()

    def _start(self, make: Callable[..., Any], arguments: tuple[Any, ...], rank: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        name = f"minivllm rank {rank}"
        process = spawn.Process(target=_live, args=(make, arguments, theirs), name=name, daemon=True)
        resource_tracker.ensure_running()  # whose own start would let Ctrl-C through again
        allowed = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()  # a rank inherits that: Ctrl-C goes to every process of a terminal, and the parent decides
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
        theirs.close()  # or the rank's end would not close the pipe
        self.processes.append(process)
        self._pipes.append(ours)

    def _call(self, method: str, arguments: tuple[Any, ...], ranks: Sequence[int]) -> list[Any]:
        if self._dead is not None:
            raise self._dead
        number = next(self._numbers)
        message = pickle.dumps(Call(number, method, arguments, one_reply=len(ranks) < self.size))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._fail(rank, self._last_words(rank))
        return self._replies(number, ranks)

    def _replies(self, number: int, ranks: Sequence[int]) -> list[Any]:
        """What these ranks reply to call `number`. Replies to calls that were interrupted are passed over."""
        values: dict[int, Any] = {}
        while len(values) < len(ranks):
            for rank in self._ranks_with_news(range(self.size), timeout=None):
                news = self._hear(rank)
                if isinstance(news, Failure):
                    self._fail(rank, news)
                if news.number == number:
                    values[rank] = news.value
        return [values[rank] for rank in ranks]

    def _ranks_with_news(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        """Those that have sent something, or have ended."""
        sources = {rank: (self._pipes[rank], self.processes[rank].sentinel) for rank in ranks}
        ready = connection.wait([source for pair in sources.values() for source in pair], timeout)
        return [rank for rank, (pipe, sentinel) in sources.items() if pipe in ready or sentinel in ready]

    def _hear(self, rank: int) -> Reply | Failure:
        """What the rank has sent; where it ended without a word, how."""
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return Failure(self._how_it_ended(rank))

    def _last_words(self, rank: int) -> Failure:
        while not isinstance(news := self._hear(rank), Failure):
            continue
        return news

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(SECONDS_FOR_REPORTS)
        code = process.exitcode
        if code is not None and code < 0:
            return f"it was killed by {signal.Signals(-code).name}"
        hint = "" if self._ready else "; a script must make such an LLM under `if __name__ == '__main__':`"
        return f"its process ended with exit code {code}{hint}"

    def _fail(self, rank: int, failure: Failure) -> NoReturn:
        """Ends all ranks, and raises the error of the one that began."""
        silent = set(range(self.size)) - {rank}
        deadline = time.monotonic() + SECONDS_FOR_REPORTS
        while failure.lost_peer and silent:
            heard = self._ranks_with_news(sorted(silent), max(0.0, deadline - time.monotonic()))
            if not heard:
                break
            for other in heard:
                words = self._hear(other)
                if isinstance(words, Reply):
                    continue  # it came through, and may say no more
                silent.discard(other)
                if not words.lost_peer:
                    rank, failure = other, words
        pid = self.processes[rank].pid
        self._dead = WorkerDiedError(
            f"rank {rank} of {self.size} (process {pid}) has ended, and the engine with it: {failure.text}"
        )
        for process in self.processes:
            process.kill()
        self._finalizer()
        if failure.refusal is not None:
            raise failure.refusal
        raise self._dead


def _end(owner: int, processes: Sequence[BaseProcess], pipes: Sequence[Connection]) -> None:
    """Tells every rank to leave, and kills those that are still there a little later."""
    if os.getpid() != owner:
        return  # a fork of the process that they belong to
    for pipe in pipes:
        pipe.close()
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


# ---- in the rank's process -------------------------------------------------------------------------------------------


def _live(make: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """The whole life of a rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = arguments[-1]
    try:
        worker = make(*arguments)
        pipe.send(Reply(0, None))
        while (call := _next_call(pipe)) is not None:
            value = getattr(worker, call.method)(*call.arguments)
            if rank == 0 or not call.one_reply:
                pipe.send(Reply(call.number, value))
    except Exception as error:
        refusal = error if isinstance(error, MinivllmError) else None
        pipe.send(Failure(traceback.format_exc(), refusal, isinstance(error, LostPeerError)))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # leaving in order could wait for peers that never come


def _next_call(pipe: Connection) -> Call | None:
    """None where nobody wants more."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
