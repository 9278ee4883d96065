"""Run one rank: create its object, and handle calls one after another until there are no more.

A rank survives an exception in a call. It leaves its group, so that no other rank waits for it in
vain, and replies with the exception. It answers all further calls with the same failure, without
running them, until the call `reset`: a step that was already on its way would find the ranks in
different states.

In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`WorkerProc.worker_busy_loop`).
"""

import os
import pickle
import socket
from typing import Any, BinaryIO, NoReturn

from minivllm.executor.rank_messages import RESET, Call, Failure, Reply
from minivllm.platforms.collector import while_loading


class RankLoop:
    """One rank's object, and the failure since its last reset, if any.

    Besides the methods that are called on it, the object has `reset`, which forgets what earlier
    calls have left and joins the other ranks again, and `leave_group`, which ends the connections
    to the other ranks: those that wait in one of them raise `LostPeerError`.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.failure: Failure | None = None

    def answer(self, call: Call) -> Reply:
        """Handle a call. An exception while resetting or leaving the group propagates, and ends the
        rank.
        """
        if call.method == RESET:
            self.failure = None
            return Reply(call.number, self._run(call))
        if self.failure is None:
            try:
                return Reply(call.number, self._run(call))
            except Exception as error:
                # Remember it: calls that were sent before the failure was known get it as their
                # answer.
                self.failure = Failure.of(error)
            # Other ranks may wait for this one in a collective operation; now they fail instead.
            self.worker.leave_group()
        return Reply(call.number, failure=self.failure)

    def _run(self, call: Call) -> Any:
        return getattr(self.worker, call.method)(*call.arguments)


def live(sock: socket.socket) -> NoReturn:
    """Run a rank until its socket is closed, and end this process."""
    try:
        serve(sock)
    finally:
        os._exit(0)  # an orderly exit could wait forever for peers


def serve(sock: socket.socket) -> None:
    """Run a rank until its socket is closed. If it fails for good, its last message is the failure."""
    try:
        calls = sock.makefile("rb")
        with while_loading():  # the function's module, and torch with it
            make, arguments = pickle.load(calls)
        rank = arguments[-1]
        loop = RankLoop(make(*arguments))
        _say(sock, Reply(0))
        while (call := _next_call(calls)) is not None:
            reply = loop.answer(call)
            # Failures are always reported; results only where the caller waits for this rank.
            if call.replies in (None, rank) or reply.failure is not None:
                _say(sock, reply)
    except Exception as error:
        _say(sock, Failure.of(error))


def _next_call(calls: BinaryIO) -> Call | None:
    """Return the next call, or None once the socket is closed."""
    try:
        return pickle.load(calls)
    except EOFError:
        return None


def _say(sock: socket.socket, message: Reply | Failure) -> None:
    sock.sendall(pickle.dumps(message))
