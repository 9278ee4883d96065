"""Start rank processes, call the same methods on all of them in the same order, and stop them.

A call is pickled once and sent to every rank over its own socket. A thread for each rank receives
the replies, which carry the number of their call. What a caller may rely on:

- If a call fails on one rank, the caller gets an error that says which rank and why. The ranks live
  on and answer all calls with that failure until the call `reset` (`rank_loop`). If a rank dies,
  the others are killed, and the error says which died and why. Ranks wait for each other, so the
  first to report is often not the first that failed: it reports a lost peer (`LostPeerError`), and
  the others get time to report before any is blamed.
- Ranks that do not answer a reset in time are killed.
- Ctrl-C during a call leaves the ranks usable: a call goes to all of them or to none, and the reply
  to an abandoned call is recognized by its number.
- The ranks end with `shutdown`, and with the process that started them, whatever kills it and
  however early (`platforms.child_main`).

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`MultiprocExecutor`, `WorkerProc`,
`FutureWrapper`), where calls travel through a ring buffer in shared memory.
"""

import contextlib
import itertools
import math
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from minivllm.errors import WorkerDiedError, WorkerFailedError
from minivllm.executor.rank_loop import RESET, Call, Failure, Reply
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, start_process, wait_or_kill
from minivllm.platforms.interrupts import InterruptsHeld

SECONDS_A_TURN = 0.5
"""The longest single wait: a signal delivered to another thread of this process is noticed only
after it.
"""
SECONDS_FOR_REPORTS = 1.0
"""How long the other ranks may take to report after one has lost a peer."""
SECONDS_TO_LEAVE = 2.0
"""Ranks told to leave are killed after this time."""
SECONDS_FOR_RESET = 60.0
"""Ranks that have not answered a reset after this time are killed. It includes the rest of the
step before.
"""
END = -1
"""The number of the reply that stands for a rank's end."""
Join = Callable[[list[Any]], Any]
"""Makes one result of those of the ranks that reply, in rank order."""


class RankFuture(Future[Any]):
    """The result of a call that has been sent.

    Reading it raises `WorkerFailedError` if the call has failed on a rank, `WorkerDiedError` if a
    rank has died, and a `MinivllmError` if a rank rejected the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # already sent, so it cannot be cancelled
        # A bare lock, since Ctrl-C can break the condition variable that `Future` waits on.
        self._unsettled = threading.Lock()
        self._unsettled.acquire()
        self._outcome: tuple[Any, Exception | None] | None = None

    def settle(self, value: Any, error: Exception | None = None) -> None:
        """Set the result or the error; called from the thread that received it."""
        self._outcome = value, error
        self._unsettled.release()

    def done(self) -> bool:
        """Return whether the future has a result or an error."""
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait up to `timeout` seconds for the result and return it, or raise `TimeoutError`."""
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


@dataclass(slots=True)
class _PendingCall:
    """A call that has not been answered yet. If no rank fails, `num_replies` ranks reply."""

    num_replies: int
    join: Join
    future: RankFuture = field(default_factory=RankFuture)
    replies: dict[int, Reply] = field(default_factory=dict)

    @property
    def failures(self) -> dict[int, Failure]:
        return {rank: reply.failure for rank, reply in self.replies.items() if reply.failure is not None}


RankStarter = Callable[[int], tuple[socket.socket, ChildProcess]]
"""Start a rank's process; return our end of its socket, which is closed when the rank ends."""


def start_here(rank: int) -> tuple[socket.socket, ChildProcess]:
    """Start a rank's process on this machine."""
    return start_process("minivllm.executor.rank_loop")


class RankProcesses:
    """`size` rank processes; rank r holds the object that `make(*arguments, r)` returned.

    All calls must be made from one thread. Several may be in flight: each rank handles them in the
    order in which they were made.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        size: int,
        output_rank: int = 0,
        start: RankStarter = start_here,
    ) -> None:
        """Start the ranks with `start`, by default on this machine, and wait until all are ready.

        Raises:
            MinivllmError: a rank rejected its arguments.
            WorkerDiedError: a rank died before it was ready.
        """
        self.size = size
        self.output_rank = output_rank
        self.processes: list[ChildProcess] = []
        self._sockets: list[socket.socket] = []
        # The ranks' ends are collected like replies, so that the first that failed is blamed for
        # them too.
        self._waiting = {END: _PendingCall(size, list)}
        self._numbers = itertools.count()
        self._dead: Exception | None = None
        self._owner = os.getpid()
        self._lock = threading.RLock()
        try:
            messages = [pickle.dumps((make, (*arguments, rank))) for rank in range(size)]
            for rank in range(size):
                with InterruptsHeld():  # else a process could start that nobody knows and ends
                    sock, process = start(rank)
                    self._sockets.append(sock)
                    self.processes.append(process)
            ready = self._post(next(self._numbers), messages, _PendingCall(size, list))
            for rank, sock in enumerate(self._sockets):
                threading.Thread(target=self._listen, args=(rank, sock), daemon=True).start()
            ready.result()
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return the method's results from every rank; raise the same errors as `RankFuture`, as
        soon as a rank has failed.
        """
        future = self.send(method, *arguments, join=list)
        if method != RESET:
            return future.result()
        try:
            return future.result(SECONDS_FOR_RESET)
        except TimeoutError:
            text = f"the ranks have not answered a reset for {SECONDS_FOR_RESET:g} s, and the engine has ended"
            self._end(WorkerDiedError(text), at_once=True)
            return future.result()

    def send(self, method: str, *arguments: Any, join: Join | None = None) -> RankFuture:
        """Send a call to all ranks without waiting; return a future of their results, merged by
        `join`, or without it of the result of the rank `output_rank`.
        """
        number = next(self._numbers)
        replies = self.output_rank if join is None else None
        message = pickle.dumps(Call(number, method, arguments, replies))  # fails before anything is sent
        pending = _PendingCall(1, itemgetter(0)) if join is None else _PendingCall(self.size, join)
        return self._post(number, [message] * self.size, pending)

    def shutdown(self) -> None:
        """Stop the ranks. No call can be made after that; a second call does nothing."""
        with InterruptsHeld(clean_up=True):
            self._end(WorkerDiedError("the engine has been shut down"))

    def _post(self, number: int, messages: Sequence[bytes], call: _PendingCall) -> RankFuture:
        """Send each rank its message, or raise the error that ended the ranks."""
        with InterruptsHeld(clean_up=True):  # it goes to all ranks or to none
            with self._lock:
                if self._dead is not None:
                    raise self._dead
                self._waiting[number] = call
            for sock, message in zip(self._sockets, messages, strict=True):
                with contextlib.suppress(OSError):  # that rank has ended, which its thread reports
                    sock.sendall(message)
        return call.future

    def _end(self, error: Exception, at_once: bool = False) -> None:
        """Let every rank leave, kill those that do not, and fail all calls.

        A second call does nothing; nor does a call in a fork of the process that owns the ranks.
        """
        with self._lock:
            if self._dead is not None or os.getpid() != self._owner:
                return
            self._dead = error
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # which also wakes our thread
            sock.close()
        for process in self.processes if at_once else ():
            process.kill()
        wait_or_kill(self.processes, SECONDS_TO_LEAVE)
        with self._lock:
            for call in self._waiting.values():
                call.future.settle(None, error)
            self._waiting.clear()

    def _listen(self, rank: int, sock: socket.socket) -> None:
        """Receive a rank's replies until it has ended."""
        try:
            with sock.makefile("rb") as replies:
                while not isinstance(message := pickle.load(replies), Failure):
                    self._take(rank, message)
        except Exception:  # the connection is closed, perhaps in the middle of a message
            message = None
        if self._dead is None:
            self._take(rank, Reply(END, failure=message or Failure(self._how_it_ended(rank))))

    def _take(self, rank: int, reply: Reply) -> None:
        with self._lock:
            call = self._waiting.get(reply.number)
            if call is None:  # it has failed already
                return
            call.replies[rank] = reply
            failures = call.failures.values()
            if not failures:
                self._settle_if_complete(reply.number, call)
            elif len(call.replies) < self.size and all(failure.lost_peer for failure in failures):
                # The rank that was lost has not reported yet. If it never does, blame one that
                # missed it.
                timer = threading.Timer(SECONDS_FOR_REPORTS, self._blame, (reply.number,))
                timer.daemon = True
                timer.start()
            else:
                self._blame(reply.number)

    def _settle_if_complete(self, number: int, call: _PendingCall) -> None:
        if len(call.replies) < call.num_replies:
            return
        del self._waiting[number]
        try:
            call.future.settle(call.join([call.replies[rank].value for rank in sorted(call.replies)]))
        except Exception as error:  # `join` has failed
            call.future.settle(None, error)

    def _blame(self, number: int) -> None:
        """Fail one call, or all calls after a rank's death, with the best reason that any rank has
        reported.
        """
        with self._lock:
            call = self._waiting.pop(number, None)
        if call is None:
            return
        rank, failure = min(call.failures.items(), key=lambda item: item[1].lost_peer)
        which = f"rank {rank} of {self.size}"
        if number != END:
            call.future.settle(None, failure.error(WorkerFailedError(f"{which}: {failure.text}")))
            return
        text = f"{which} (process {self.processes[rank].pid}) has ended, and the engine with it: {failure.text}"
        self._end(failure.error(WorkerDiedError(text)), at_once=True)

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_FOR_REPORTS)
        code = process.returncode
        return "its process has ended" if code is None else f"its process {how_it_ended(code)}"
