"""Run one rank: create its object, and handle calls one after another until there are no more.

A rank survives an exception in a call. It leaves its group, so that no other rank waits for it in
vain, and replies with the exception. It answers all further calls with the same failure, without
running them, until the call `reset`: a step that was already on its way would find the ranks in
different states. Messages are pickled, since both sides run the same code.

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`WorkerProc.worker_busy_loop`).
"""

import pickle
import socket
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from minivllm.errors import LostPeerError, MinivllmError
from minivllm.platforms.collector import while_loading
from minivllm.platforms.out_of_memory import explain_out_of_memory

RESET = "reset"
"""The call that a rank accepts after a failure: it must leave nothing of the calls before it."""


@dataclass(frozen=True)
class Call:
    """A call of `method(*arguments)` on every rank. Only the rank `replies` sends its result (None:
    all ranks do), and any rank that fails sends its failure.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    replies: int | None


@dataclass(frozen=True)
class Failure:
    """An exception on a rank. `refusal` is the equivalent error that the user can act on, if any;
    `lost_peer` means that another rank caused it.
    """

    text: str
    traceback: str = ""
    refusal: MinivllmError | None = None
    lost_peer: bool = False

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe the exception that is being handled."""
        refusal = error if isinstance(error, MinivllmError) else explain_out_of_memory(error)
        text = f"{type(error).__name__}: {error}"
        return cls(text, traceback.format_exc(), refusal, isinstance(error, LostPeerError))

    def error(self, otherwise: Exception) -> Exception:
        """Return the refusal, if there is one, else `otherwise` with the traceback as a note."""
        if self.refusal is not None:
            return self.refusal
        otherwise.add_note(self.traceback)
        return otherwise


@dataclass(frozen=True)
class Reply:
    """The result of a call, or the failure that prevented it."""

    number: int
    value: Any = None
    failure: Failure | None = None


def serve(sock: socket.socket) -> None:
    """Run a rank until its socket is closed. If it fails for good, its last message is the failure.

    Besides the methods that are called on it, the rank's object has `reset`, which forgets what
    earlier calls have left and joins the other ranks again, and `leave_group`, which ends the
    connections to the other ranks: those that wait in one of them raise `LostPeerError`.
    """
    try:
        calls = sock.makefile("rb")
        with while_loading():  # the function's module, and torch with it
            make, arguments = pickle.load(calls)
        rank = arguments[-1]
        worker = make(*arguments)
        reply = Reply(0)
        _send(sock, reply)
        while (call := _next_call(calls)) is not None:
            reply = _answer(worker, call, reply.failure)
            # Failures are always reported; results only where the caller waits for this rank.
            if call.replies in (None, rank) or reply.failure is not None:
                _send(sock, reply)
    except Exception as error:
        with suppress(OSError):  # the engine has ended, and closed the connection
            _send(sock, Failure.of(error))


def _answer(worker: Any, call: Call, failure: Failure | None) -> Reply:
    """Handle a call, after this failure since the last reset. An exception while resetting or
    leaving the group propagates, and ends the rank.
    """
    if call.method == RESET:
        return Reply(call.number, worker.reset())
    if failure is None:
        try:
            return Reply(call.number, getattr(worker, call.method)(*call.arguments))
        except Exception as error:
            failure = Failure.of(error)
        # Other ranks may wait for this one in a collective operation; now they fail instead.
        worker.leave_group()
    return Reply(call.number, failure=failure)


def _next_call(calls: BinaryIO) -> Call | None:
    """Return the next call, or None once the socket is closed."""
    try:
        return pickle.load(calls)
    except EOFError:
        return None


def _send(sock: socket.socket, message: Reply | Failure) -> None:
    sock.sendall(pickle.dumps(message))
