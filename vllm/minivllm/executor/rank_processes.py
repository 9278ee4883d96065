"""Rank processes, which all run the same calls in the same order: starting, calling, failing and ending them.

A call is pickled once and sent to every rank over its own socket; replies are matched by number. Five guarantees:

- If a call fails on one rank, the caller gets an error that says which rank and why, and the ranks live on; they answer
  all calls with that failure until the call `reset` (`rank_loop`). If a rank dies, the others are killed, and the error
  says which died and why. Ranks wait for each other, so the first to report is often not the first that failed: it
  reports a lost peer (`LostPeerError`), and the others get time to report before any is blamed.
- A rank that answers nothing is not waited for without end: where it does not answer a reset in time, all are killed.
- An exception at any line of a call, above all Ctrl-C, leaves the ranks usable: a call goes to all of them or to none,
  and the reply to an abandoned call is recognized by its number. For this, no byte may go unaccounted. Python raises
  KeyboardInterrupt between two bytecodes, so in `count = socket.send(data)` the bytes can be sent and the count lost.
  `counts.extend(map(socket.send, [data]))` sends and records the count with no bytecode between.
- The ranks end with the object that started them, with `shutdown`, and with the interpreter.
- The ranks end with the process that started them, whatever kills it and however early (`rank_main`).

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`MultiprocExecutor`, `WorkerProc`, `FutureWrapper`), where
calls travel through a ring buffer in shared memory.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from minivllm.errors import MinivllmError, WorkerDiedError, WorkerFailedError
from minivllm.executor.rank_messages import LENGTH, RESET, Call, Failure, Reply
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, wait_or_kill

SECONDS_A_TURN = 0.5
"""The longest single wait. A signal delivered to another thread of this process is noticed only after it."""
SECONDS_FOR_REPORTS = 1.0
"""When a rank has lost a peer, the others get this long to report."""
SECONDS_TO_LEAVE = 2.0
"""Ranks told to leave are killed after this time."""
SECONDS_FOR_RESET = 60.0
"""Ranks that have not answered a reset after this time are killed. The step before it may take a part of it."""
MAX_RECEIVE_BYTES = 1 << 20


@dataclass(frozen=True)
class Outgoing:
    """Bytes for one rank; `counts` has the number of bytes that each `send` has sent so far."""

    data: bytes
    counts: list[int] = field(default_factory=list)

    def unsent(self) -> memoryview:
        """Returns the bytes that have not been sent yet."""
        return memoryview(self.data)[sum(self.counts) :]


Join = Callable[[Sequence[Any]], Any]
"""Makes one result of those of all ranks."""


class RankFuture(Future[Any]):
    """The result of a call that has been sent: that of the one rank that replies, else the list of all ranks' results.

    No thread listens in the background: replies are received while this or another future of the ranks is queried.
    """

    def __init__(self, ranks: "RankProcesses", replies: int | None, join: Join | None = None) -> None:
        super().__init__()
        self._ranks, self._one, self._join = ranks, replies, join
        self._replies: dict[int, Reply] = {}
        self._blame_after = math.inf
        self.set_running_or_notify_cancel()  # already sent, so it cannot be cancelled

    def done(self) -> bool:
        """Whether there is a result or an error; first receives what the ranks have sent so far."""
        with contextlib.suppress(Exception):  # `result` raises it
            self._ranks.wait_for(self, 0.0)
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Waits at most `timeout` seconds for the result, and returns it.

        Raises:
            WorkerFailedError: the call has failed on a rank.
            WorkerDiedError: a rank has died.
            MinivllmError: a rank rejected the call.
            TimeoutError: there is no result yet.
        """
        self._ranks.wait_for(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as `result` does, but returns the error, or None."""
        with contextlib.suppress(WorkerFailedError, WorkerDiedError, MinivllmError):
            self._ranks.wait_for(self, timeout)
        return super().exception(0)

    def is_settled(self) -> bool:
        """As `done`, but without receiving anything."""
        return super().done()

    def take_reply(self, rank: int, reply: Reply) -> None:
        """Records one rank's reply; after an interrupt, the same reply may be passed twice."""
        self._replies[rank] = reply
        failures = {rank: reply.failure for rank, reply in self._replies.items() if reply.failure is not None}
        if not failures:
            self._take_values()
            return
        rank, failure = first_to_fail(failures)
        self._blame_after = min(self._blame_after, time.monotonic() + SECONDS_FOR_REPORTS)
        if not failure.lost_peer or len(self._replies) == self._ranks.size:
            self._blame_after = -math.inf
        self.blame_if_due()

    def blame_if_due(self) -> None:
        """Sets a failure as error, once no other rank is expected to report a better reason."""
        if time.monotonic() < self._blame_after:
            return
        failures = {rank: reply.failure for rank, reply in self._replies.items() if reply.failure is not None}
        rank, failure = first_to_fail(failures)
        self.fail(failure.error(WorkerFailedError(f"rank {rank} of {self._ranks.size}: {failure.text}")))

    def fail(self, error: Exception) -> None:
        """Sets an error, unless there is already a result or an error."""
        if not self.is_settled():
            self.set_exception(error)

    def _take_values(self) -> None:
        everybody = range(self._ranks.size)
        if self.is_settled():
            return
        if self._one is not None:
            if self._one in self._replies:
                self.set_result(self._replies[self._one].value)
        elif len(self._replies) == len(everybody):
            values = [self._replies[rank].value for rank in everybody]
            self.set_result(self._join(values) if self._join else values)


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

    `make` must be a function in an importable module; the ranks do not import the running script. It returns a
    `RankWorker`. All calls must be made from one thread. Several may be in flight: each rank handles them in the order
    in which they were made.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        size: int,
        output_rank: int = 0,
        start: "RankStarter | None" = None,
    ) -> None:
        """Starts the ranks, each with `start`, by default on this machine, and waits until all are ready.

        Raises:
            MinivllmError: a rank rejected its arguments.
            WorkerDiedError: a rank died before it was ready.
        """
        self.size, self.output_rank = size, output_rank
        self.processes: list[ChildProcess] = []
        self._sockets: list[socket.socket] = []
        self._received: list[list[bytes]] = [[] for _ in range(size)]
        self._numbers = itertools.count(1)
        self._futures: dict[int, RankFuture] = {}
        self._failures: dict[int, Failure] = {}
        self._dead: WorkerDiedError | None = None
        self._end = functools.partial(_end, os.getpid(), self.processes, self._sockets)
        self._finalizer = weakref.finalize(self, self._end)
        try:
            ready = self._futures[0] = RankFuture(self, None)
            self._outgoing = [Outgoing(pickle.dumps((make, (*arguments, rank)))) for rank in range(size)]
            for rank in range(size):
                sock, process = (start or start_here)(rank)
                sock.setblocking(False)
                self._sockets.append(sock)
                self.processes.append(process)
            ready.result()
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Returns the method's results on every rank; raises as `RankFuture.result`, as soon as a rank has failed."""
        future = self._send(method, arguments, None)
        if method != RESET:
            return future.result()
        try:
            results = future.result(SECONDS_FOR_RESET)
        except TimeoutError:
            self._end_all(f"the ranks have not answered a reset for {SECONDS_FOR_RESET:g} s, and the engine has ended")
        self._futures.clear()  # what is still there has failed before the reset
        return results

    def call_for_one(self, method: str, *arguments: Any) -> Any:
        """As `call`, but waits only for the rank `output_rank`, and returns its result."""
        return self.send_for_one(method, *arguments).result()

    def send_for_one(self, method: str, *arguments: Any) -> RankFuture:
        """Sends a call to all ranks; returns a future of the result of the rank `output_rank`, without waiting."""
        return self._send(method, arguments, self.output_rank)

    def send_for_all(self, method: str, *arguments: Any, join: Join) -> RankFuture:
        """Sends a call to all ranks; returns a future of what `join` makes of their results, without waiting."""
        return self._send(method, arguments, None, join)

    def wait_for(self, future: RankFuture, timeout: float | None) -> None:
        """Receives until the future is settled. Raises the ranks' error, or `TimeoutError`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not future.is_settled():
            if self._dead is not None:
                future.fail(self._dead)
                raise self._dead
            left = deadline - time.monotonic()
            self._take_turn(max(0.0, min(left, SECONDS_A_TURN)))
            future.blame_if_due()
            if left <= 0.0 and not future.is_settled():
                raise TimeoutError("the ranks have not replied yet")

    def shutdown(self) -> None:
        """Ends the ranks. No call can be made after that; a second call does nothing."""
        self._dead = self._dead or WorkerDiedError("the engine has been shut down")
        self._end()
        self._finalizer.detach()

    def _send(
        self, method: str, arguments: tuple[Any, ...], replies: int | None, join: Join | None = None
    ) -> RankFuture:
        if self._dead is not None:
            raise self._dead
        future, number = RankFuture(self, replies, join), next(self._numbers)
        message = pickle.dumps(Call(number, method, arguments, replies))  # fails before anything is sent
        # This assignment commits the call for all ranks: if sending is interrupted, the next call sends the rest.
        self._outgoing = [Outgoing(b"".join((outgoing.unsent(), message))) for outgoing in self._outgoing]
        self._futures[number] = future
        self._write()
        while any(outgoing.unsent() for outgoing in self._outgoing):
            self._take_turn(SECONDS_A_TURN)
        return future

    def _take_turn(self, timeout: float) -> None:
        """Sends and receives, waiting up to `timeout` seconds for either. Raises an error if a rank has died."""
        self._exchange(timeout)
        if self._failures:
            self._fail()

    def _exchange(self, timeout: float) -> None:
        poll = select.poll()
        ranks = {sock.fileno(): rank for rank, sock in enumerate(self._sockets) if rank not in self._failures}
        for fd, rank in ranks.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if self._outgoing[rank].unsent() else 0))
        ready = [(ranks[fd], event) for fd, event in poll.poll(timeout * 1000)]
        self._write()
        ended = [rank for rank, event in ready if event & ~select.POLLOUT and not self._read(rank)]
        for rank in range(self.size):
            self._take_messages(rank)  # including bytes received in a turn that was interrupted
        for rank in ended:
            self._failures.setdefault(rank, Failure(self._how_it_ended(rank)))

    def _write(self) -> None:
        for sock, outgoing in zip(self._sockets, self._outgoing, strict=True):
            if unsent := outgoing.unsent():
                with contextlib.suppress(OSError):  # full, as `poll` will tell, or closed, as `recv` will tell
                    outgoing.counts.extend(map(sock.send, (unsent,)))

    def _read(self, rank: int) -> bool:
        """Receives some bytes; returns False at the end of the stream."""
        received = self._received[rank]
        try:
            received.extend(map(self._sockets[rank].recv, (MAX_RECEIVE_BYTES,)))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return received[-1] != b""

    def _take_messages(self, rank: int) -> None:
        data = memoryview(b"".join(self._received[rank]))
        while len(data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(data)[0]
            if len(data) < end:
                break
            self._take_message(rank, pickle.loads(data[LENGTH.size : end]))
            data = data[end:]
        self._received[rank] = [bytes(data)]  # if interrupted before this, the same messages are taken again

    def _take_message(self, rank: int, message: Reply | Failure) -> None:
        if isinstance(message, Failure):
            self._failures[rank] = message
        elif future := self._futures.get(message.number):
            future.take_reply(rank, message)
            if future.is_settled():
                self._futures.pop(message.number, None)

    def _how_it_ended(self, rank: int) -> str:
        process = self.processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_FOR_REPORTS)
        code = process.returncode
        return "its process has ended" if code is None else f"its process {how_it_ended(code)}"

    def _fail(self) -> NoReturn:
        """Kills all ranks, and raises the error of the one that failed first."""
        deadline = time.monotonic() + SECONDS_FOR_REPORTS
        while all(failure.lost_peer for failure in self._failures.values()) and len(self._failures) < self.size:
            if (left := deadline - time.monotonic()) <= 0.0:
                break
            self._exchange(left)
        rank, failure = first_to_fail(self._failures)
        process = self.processes[rank]
        self._end_all(
            f"rank {rank} of {self.size} (process {process.pid}) has ended, and the engine with it: {failure.text}",
            failure,
        )

    def _end_all(self, text: str, failure: Failure | None = None) -> NoReturn:
        """Kills all ranks; raises the failure, if the user can act on it, else `WorkerDiedError` with this text."""
        self._dead = WorkerDiedError(text)
        error = failure.error(self._dead) if failure else self._dead
        for process in self.processes:
            process.kill()
        for future in self._futures.values():
            future.fail(error)
        self._futures.clear()
        self.shutdown()
        raise error


def first_to_fail(failures: Mapping[int, Failure]) -> tuple[int, Failure]:
    """Returns the rank to blame, and its failure: one that has lost a peer is only the last choice."""
    return min(failures.items(), key=lambda item: item[1].lost_peer)


def _end(owner: int, processes: Sequence[ChildProcess], sockets: Sequence[socket.socket]) -> None:
    """Tells every rank to leave, and kills those still running after `SECONDS_TO_LEAVE`."""
    if os.getpid() != owner:
        return  # this is a fork of the process that owns them
    for sock in sockets:
        sock.close()
    wait_or_kill(processes, SECONDS_TO_LEAVE)
