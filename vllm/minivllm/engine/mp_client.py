"""A core in a process of its own, seen from the front end: how it is started, talked to, missed and ended.

Two sockets, in a folder that only this user can read: requests go to the core by its identity (so that one front end
may have several cores), outputs come back (`wire.py`).

The process is a fresh interpreter that runs `minivllm.engine.core_entry`: a script needs no `if __name__ == "__main__"`
for it. It ignores Ctrl-C, which the front end decides about, and ends when the front end does: their lifeline is a pipe
that closes with whoever goes first.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`MPClient`, `SyncMPClient`), `vllm/v1/engine/utils.py`
(`CoreEngineProcManager`).
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import zmq

from minivllm import errors
from minivllm.core.messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import UTILITIES, EngineCoreClient
from minivllm.engine.wire import IDENTITY, Failure, Kind, decode, encode
from minivllm.errors import EngineDeadError

SECONDS_TO_LEAVE = 10.0
"""A core that is told to leave and does not is killed after this: it ends its ranks first."""


class SyncMPClient(EngineCoreClient):
    """Waits where it asks: for `LLM`. Sockets and process belong to this object, and end with it."""

    def __init__(self, args: EngineArgs) -> None:
        self._dead: Exception | None = None
        self._call_ids = itertools.count()
        self._early: list[EngineCoreOutputs] = []
        folder = tempfile.mkdtemp(prefix="minivllm-")
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.ROUTER)
        self._output = self._context.socket(zmq.PULL)
        for socket, name in ((self._input, "input"), (self._output, "output")):
            socket.linger = 0
            socket.bind(f"ipc://{folder}/{name}")
        self.process, self._lifeline = _start(folder)
        self._finalizer = weakref.finalize(self, _end, self._context, self.process, self._lifeline, folder)
        try:
            self.ready = self._meet(args)
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        """As `EngineCoreClient`."""
        self._send(Kind.ADD, request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """As `EngineCoreClient`; what is under way for them still comes, and is to be passed over."""
        if request_ids and self._dead is None:
            self._send(Kind.ABORT, list(request_ids))

    def get_output(self) -> EngineCoreOutputs:
        """As `EngineCoreClient`."""
        return self._early.pop(0) if self._early else self._receive()

    def call_utility(self, method: str) -> Any:
        """As `EngineCoreClient`. Outputs that come before the answer are kept for `get_output`."""
        assert method in UTILITIES
        call_id = next(self._call_ids)
        self._send(Kind.UTILITY, (call_id, method))
        while True:
            message = self._receive()
            answer = message.utility_output
            if answer is None:
                self._early.append(message)
            elif answer.call_id == call_id:  # others were asked by calls that were interrupted
                if answer.error is not None:
                    raise RuntimeError(f"{method} failed in the engine's core: {answer.error}")
                return answer.result

    def shutdown(self) -> None:
        """As `EngineCoreClient`."""
        self._dead = self._dead or EngineDeadError("the engine has been shut down")
        self._finalizer()

    def _meet(self, args: EngineArgs) -> EngineCoreReady:
        """Waits for the core to be there, tells it what to be, and waits for it to be that."""
        kind, _ = self._wait(self._input)[1:]
        assert kind == Kind.HELLO
        self._send(Kind.START, {field.name: getattr(args, field.name) for field in fields(args)})
        kind, payload = self._wait(self._input)[1:]
        if kind == Kind.FAILED:
            raise decode(payload, Failure).error()
        return decode(payload, EngineCoreReady)

    def _send(self, kind: bytes, message: Any) -> None:
        if self._dead is not None:
            raise self._dead
        self._input.send_multipart((IDENTITY, kind, encode(message)))

    def _receive(self) -> EngineCoreOutputs:
        kind, payload = self._wait(self._output)
        if kind == Kind.FAILED:
            self._dead = decode(payload, Failure).error()
            raise self._dead
        return decode(payload, EngineCoreOutputs)

    def _wait(self, socket: zmq.Socket) -> list[bytes]:
        """The next message, or an error as soon as the core's process has ended without one."""
        if self._dead is not None:
            raise self._dead
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        ready = dict(poller.poll())
        if socket in ready or socket.poll(0):
            return socket.recv_multipart()
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._dead = EngineDeadError(f"the engine's core (process {self.process.pid}) {how}; its output says why")
        self._finalizer()
        raise self._dead


def _start(folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """The core's process, and our end of the lifeline: readable as soon as the process is gone."""
    home = str(Path(errors.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    ours, theirs = os.pipe()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits that
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minivllm.engine.core_entry", folder, str(theirs)],
            stdin=subprocess.PIPE,  # never written to: it closes when we are gone
            pass_fds=(theirs,),
            env=os.environ | {"PYTHONPATH": path},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(theirs)
    return process, ours


def _end(context: zmq.Context, process: subprocess.Popen[bytes], lifeline: int, folder: str) -> None:
    """Lets go of the process, and kills it if it stays."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(SECONDS_TO_LEAVE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(lifeline)
    context.destroy(linger=0)
    shutil.rmtree(folder, ignore_errors=True)
