"""Rank processes, which all run the same calls in the same order: starting, calling, failing and ending them.

A call is pickled once and sent to every rank over its own socket; a thread for each rank receives its replies, which
are matched by number. Five guarantees:

- If a call fails on one rank, the caller gets an error that says which rank and why, and the ranks live on; they answer
  all calls with that failure until the call `reset` (`rank_loop`). If a rank dies, the others are killed, and the error
  says which died and why. Ranks wait for each other, so the first to report is often not the first that failed: it
  reports a lost peer (`LostPeerError`), and the others get time to report before any is blamed.
- A rank that answers nothing is not waited for without end: where it does not answer a reset in time, all are killed.
- Ctrl-C at any moment of a call leaves the ranks usable: a call goes to all of them or to none (`InterruptsHeld`), and
  the reply to an abandoned call is recognized by its number.
- The ranks end with the object that started them, with `shutdown`, and with the interpreter.
- The ranks end with the process that started them, whatever kills it and however early (`rank_main`).

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`MultiprocExecutor`, `WorkerProc`, `FutureWrapper`), where
calls travel through a ring buffer in shared memory.
"""

import contextlib
import itertools
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError, WorkerDiedError, WorkerFailedError
from minivllm.executor.rank_messages import RESET, Call, Failure, Reply
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, wait_or_kill
from minivllm.platforms.interrupts import InterruptsHeld

SECONDS_A_TURN = 0.5
"""The longest single wait. A signal delivered to another thread of this process is noticed only after it."""
SECONDS_FOR_REPORTS = 1.0
"""When a rank has lost a peer, the others get this long to report."""
SECONDS_TO_LEAVE = 2.0
"""Ranks told to leave are killed after this time."""
SECONDS_FOR_RESET = 60.0
"""Ranks that have not answered a reset after this time are killed. The step before it may take a part of it."""
Join = Callable[[Sequence[Any]], Any]
"""Makes one result of those of all ranks."""


class RankFuture(Future[Any]):
    """The result of a call that has been sent: that of the one rank that replies, else the list of all ranks' results.

    It raises `WorkerFailedError` if the call has failed on a rank, `WorkerDiedError` if a rank has died, and a
    `MinivllmError` if a rank rejected the call. It waits on a bare lock: Ctrl-C in the middle of a condition variable's
    own code, which `Future` waits on, would break that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # already sent, so it cannot be cancelled
        self._unsettled = threading.Lock()
        self._unsettled.acquire()
        self._outcome: tuple[Any, Exception | None] | None = None

    def settle(self, value: Any, error: Exception | None = None) -> None:
        """Set the result or the error, from the thread that has received it."""
        self._outcome = value, error
        self._unsettled.release()

    def done(self) -> bool:
        """Return whether there is a result or an error."""
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds for the result, and return it, or raise `TimeoutError`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = deadline - time.monotonic()
            if left <= 0.0:
                raise TimeoutError("the ranks have not replied yet")
            if self._unsettled.acquire(timeout=min(left, SECONDS_A_TURN)):
                self._unsettled.release()
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, but return the error, or None."""
        try:
            self.result(timeout)
        except (WorkerFailedError, WorkerDiedError, MinivllmError) as error:
            return error
        return None


@dataclass(slots=True)
class _Waiting:
    """A call that is not answered yet. Only the rank `one` replies (None: all), and whoever fails."""

    one: int | None
    join: Join | None
    future: RankFuture = field(default_factory=RankFuture)
    replies: dict[int, Reply] = field(default_factory=dict)


class _Ranks:
    """The processes, and what they have said. It belongs to the threads that listen as much as to `RankProcesses`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[ChildProcess] = []
        self.sockets: list[socket.socket] = []
        self.waiting: dict[int, _Waiting] = {}
        self.dead: Exception | None = None
        self._owner = os.getpid()
        self._ends: dict[int, Failure] = {}
        self._lock = threading.RLock()

    def listen(self, rank: int, sock: socket.socket) -> None:
        """Take in what a rank says, until it has ended."""
        try:
            with sock.makefile("rb") as replies:
                while not isinstance(message := pickle.load(replies), Failure):
                    self._take(rank, message)
        except Exception:  # the connection is closed, perhaps in the middle of a message
            message = None
        if self.dead is None:
            self._take_end(rank, message or Failure(self._how_it_ended(rank)))

    def send(self, number: int, call: _Waiting, messages: Sequence[bytes]) -> None:
        """Send each rank its message, unless they have ended."""
        with self._lock:
            if self.dead is not None:
                raise self.dead
            self.waiting[number] = call
        for sock, message in zip(self.sockets, messages, strict=True):
            with contextlib.suppress(OSError):  # that rank has ended, as its thread will tell
                sock.sendall(message)

    def end(self, error: Exception, at_once: bool = False) -> None:
        """Let every rank leave, kill those that do not, and fail all calls. A second one does nothing.

        In a fork of the process that owns them it does nothing either.
        """
        with self._lock:
            if self.dead is not None or os.getpid() != self._owner:
                return
            self.dead = error
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # which also wakes our thread
            sock.close()
        for process in self.processes if at_once else ():
            process.kill()
        wait_or_kill(self.processes, SECONDS_TO_LEAVE)
        with self._lock:
            for call in self.waiting.values():
                call.future.settle(None, error)
            self.waiting.clear()

    def _take(self, rank: int, reply: Reply) -> None:
        with self._lock:
            call = self.waiting.get(reply.number)
            if call is None:
                return
            call.replies[rank] = reply
            failures = [one.failure for one in call.replies.values() if one.failure is not None]
            if not failures:
                self._settle_if_complete(reply.number, call)
            elif all(one.lost_peer for one in failures) and len(call.replies) < self.size:
                _later(self._blame, reply.number)
            else:
                self._blame(reply.number)

    def _settle_if_complete(self, number: int, call: _Waiting) -> None:
        if call.one is None and len(call.replies) < self.size:
            return
        del self.waiting[number]
        values = [call.replies[rank].value for rank in sorted(call.replies)]
        try:
            call.future.settle(call.join(values) if call.join else values if call.one is None else values[0])
        except Exception as error:  # `join` has failed
            call.future.settle(None, error)

    def _blame(self, number: int) -> None:
        """Fail a call with the best reason that a rank has given."""
        with self._lock:
            call = self.waiting.pop(number, None)
        if call is not None:
            failures = {rank: one.failure for rank, one in call.replies.items() if one.failure is not None}
            rank, failure = first_to_fail(failures)
            call.future.settle(None, failure.error(WorkerFailedError(f"rank {rank} of {self.size}: {failure.text}")))

    def _take_end(self, rank: int, failure: Failure) -> None:
        with self._lock:
            self._ends[rank] = failure
            wait = all(one.lost_peer for one in self._ends.values()) and len(self._ends) < self.size
        if wait:
            _later(self._blame_end)
        else:
            self._blame_end()

    def _blame_end(self) -> None:
        rank, failure = first_to_fail(self._ends)
        text = f"rank {rank} of {self.size} (process {self.processes[rank].pid}) has ended, and the engine with it"
        self.end(failure.error(WorkerDiedError(f"{text}: {failure.text}")), at_once=True)

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_FOR_REPORTS)
        code = process.returncode
        return "its process has ended" if code is None else f"its process {how_it_ended(code)}"


RankStarter = Callable[[int], tuple[socket.socket, ChildProcess]]
"""Starts a rank's process; returns our end of its socket, which is closed when the rank ends."""


def start_here(rank: int) -> tuple[socket.socket, ChildProcess]:
    """Start a rank's process on this machine."""
    ours, theirs = socket.socketpair()
    with theirs:  # close our copy, so that the socket hangs up when the rank ends
        script, fd = Path(__file__).with_name("rank_main.py"), str(theirs.fileno())
        command = [sys.executable, "-P", str(script), fd, str(os.getpid()), json.dumps(list(map(str, sys.path)))]
        # A terminal sends Ctrl-C to its whole foreground process group. Each rank gets its own session, so that
        # only this process receives it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    return ours, process


class RankProcesses:
    """`size` processes; rank r holds the object that `make(*arguments, r)` returned.

    All calls must be made from one thread. Several may be in flight: each rank handles them in the order
    in which they were made.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        size: int,
        output_rank: int = 0,
        start: RankStarter = start_here,
    ) -> None:
        """Start the ranks, each with `start`, by default on this machine, and wait until all are ready.

        Raises:
            MinivllmError: a rank rejected its arguments.
            WorkerDiedError: a rank died before it was ready.
        """
        self.size, self.output_rank = size, output_rank
        self._ranks = _Ranks(size)
        self._numbers = itertools.count(1)
        self._finalizer = weakref.finalize(self, self._ranks.end, WorkerDiedError("the engine has been shut down"))
        try:
            messages = [pickle.dumps((make, (*arguments, rank))) for rank in range(size)]
            for rank in range(size):
                with InterruptsHeld():
                    sock, process = start(rank)
                    self._ranks.sockets.append(sock)
                    self._ranks.processes.append(process)
            ready = _Waiting(None, None)
            self._ranks.send(0, ready, messages)
            for rank, sock in enumerate(self._ranks.sockets):
                threading.Thread(target=self._ranks.listen, args=(rank, sock), daemon=True).start()
            ready.future.result()
        except BaseException:
            self.shutdown()
            raise

    @property
    def processes(self) -> list[ChildProcess]:
        """The ranks' processes."""
        return self._ranks.processes

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return the method's results on every rank; raises as `RankFuture`, as soon as a rank has failed."""
        future = self._send(method, arguments, None)
        if method != RESET:
            return future.result()
        try:
            results = future.result(SECONDS_FOR_RESET)
        except TimeoutError:
            text = f"the ranks have not answered a reset for {SECONDS_FOR_RESET:g} s, and the engine has ended"
            self._ranks.end(WorkerDiedError(text), at_once=True)
            results = future.result()
        self._ranks.waiting.clear()  # what is still there has failed before the reset
        return results

    def call_for_one(self, method: str, *arguments: Any) -> Any:
        """As `call`, but wait only for the rank `output_rank`, and return its result."""
        return self.send_for_one(method, *arguments).result()

    def send_for_one(self, method: str, *arguments: Any) -> RankFuture:
        """Send a call to all ranks; return a future of the result of the rank `output_rank`, without waiting."""
        return self._send(method, arguments, self.output_rank)

    def send_for_all(self, method: str, *arguments: Any, join: Join) -> RankFuture:
        """Send a call to all ranks; return a future of what `join` makes of their results, without waiting."""
        return self._send(method, arguments, None, join)

    def shutdown(self) -> None:
        """End the ranks. No call can be made after that; a second call does nothing."""
        with InterruptsHeld(clean_up=True):
            self._finalizer()

    def _send(
        self, method: str, arguments: tuple[Any, ...], replies: int | None, join: Join | None = None
    ) -> RankFuture:
        number = next(self._numbers)
        message = pickle.dumps(Call(number, method, arguments, replies))  # fails before anything is sent
        call = _Waiting(replies, join)
        with InterruptsHeld(clean_up=True):  # it goes to all ranks or to none
            self._ranks.send(number, call, [message] * self.size)
        return call.future


def first_to_fail(failures: Mapping[int, Failure]) -> tuple[int, Failure]:
    """Return the rank to blame, and its failure: one that has lost a peer is only the last choice."""
    return min(failures.items(), key=lambda item: item[1].lost_peer)


def _later(act: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(SECONDS_FOR_REPORTS, act, arguments)
    timer.daemon = True
    timer.start()
