"""The front end's side of a core in a separate process: starting it, talking to it, noticing its death, ending it.

There are two sockets, in a folder that only this user can read: one sends requests, addressed to the core's identity
(so that one front end could have several cores), the other receives outputs (`wire.py`).

The process is a fresh interpreter that runs `minivllm.engine.core_entry`, so a user's script needs no
`if __name__ == "__main__"`. It ignores Ctrl-C, which the front end handles. Each side notices the other's end by a pipe
that closes with it: the core's standard input, and the lifeline.

`async_mp_client.py` has the client for an event loop.

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
from minivllm.platforms.interrupts import InterruptsHeld

SECONDS_TO_LEAVE = 10.0
"""A core told to leave is killed after this time. It is generous because the core ends its ranks first."""


class MPClient(EngineCoreClient):
    """What a blocking client and one for an event loop share. It owns the sockets and the process, which end with it.

    Raises:
        MinivllmError: the core rejects the arguments.
        EngineDeadError: the core's process died before it was ready.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._dead: Exception | None = None
        self._call_ids = itertools.count()
        self._resources = _Resources()
        self._finalizer = weakref.finalize(self, self._resources.end)
        try:
            self._input = self._resources.bind(zmq.ROUTER, "input")
            self._input.router_mandatory = True
            self._output = self._resources.bind(zmq.PULL, "output")
            self.process, self._lifeline = self._resources.start()
            self.ready = self._meet(args)
        except BaseException:
            self.shutdown()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        """See `EngineCoreClient`."""
        self._send(Kind.ADD, request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """See `EngineCoreClient`; outputs already on their way still arrive, and the caller must ignore them."""
        if request_ids and self._dead is None:
            self._send(Kind.ABORT, list(request_ids))

    def shutdown(self) -> None:
        """See `EngineCoreClient`."""
        self._dead = self._dead or EngineDeadError("the engine has been shut down")
        self._finalizer()

    def _meet(self, args: EngineArgs) -> EngineCoreReady:
        """Waits for the core's hello, sends it the engine's arguments, and waits until it is ready."""
        self._wait(self._input)
        _, kind, _ = self._input.recv_multipart()
        assert kind == Kind.HELLO
        settings = {field.name: getattr(args, field.name) for field in fields(args)}
        del settings["parts"]  # Python objects; EngineArgs has refused any
        self._send(Kind.START, settings)
        self._wait(self._input)
        _, kind, payload = self._input.recv_multipart()
        if kind == Kind.FAILED:
            raise decode(payload, Failure).error()
        return decode(payload, EngineCoreReady)

    def _send(self, kind: bytes, message: Any) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            with InterruptsHeld(clean_up=True):  # a message is sent as a whole
                self._input.send_multipart((IDENTITY, kind, encode(message)))
        except zmq.ZMQError:  # nobody is there any more
            raise self._unreachable() from None

    def _unpacked(self, kind: bytes, payload: bytes) -> EngineCoreOutputs:
        """The outputs in a message of the core; raises what it says instead, in its last one."""
        if kind == Kind.FAILED:
            self._dead = decode(payload, Failure).error()
            raise self._dead
        return decode(payload, EngineCoreOutputs)

    def _wait(self, socket: zmq.Socket) -> None:
        """Waits for the next message, or raises `EngineDeadError` if the core's process has ended without one."""
        if self._dead is not None:
            raise self._dead
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._lifeline, zmq.POLLIN)
        ready = dict(poller.poll())
        if socket not in ready and not socket.poll(0):
            raise self._died()

    def _unreachable(self) -> Exception:
        return self._died()

    def _died(self) -> Exception:
        """How the core's process has ended, as an error; everything is given back."""
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._dead = EngineDeadError(f"the engine's core (process {self.process.pid}) {how}; its output says why")
        self._finalizer()
        return self._dead


class SyncMPClient(MPClient):
    """A blocking client, for `LLM`."""

    def __init__(self, args: EngineArgs) -> None:
        self._early: list[EngineCoreOutputs] = []
        super().__init__(args)

    def get_output(self) -> EngineCoreOutputs:
        """See `EngineCoreClient`."""
        return self._early.pop(0) if self._early else self._receive()

    def call_utility(self, method: str) -> Any:
        """See `EngineCoreClient`. Outputs that arrive before the reply are kept for `get_output`."""
        assert method in UTILITIES
        call_id = next(self._call_ids)
        self._send(Kind.UTILITY, (call_id, method))
        while True:
            message = self._receive()
            answer = message.utility_output
            if answer is None:
                self._early.append(message)
            elif answer.call_id == call_id:  # other replies belong to interrupted calls
                if answer.error is not None:
                    raise RuntimeError(f"{method} failed in the engine's core: {answer.error}")
                return answer.result

    def _receive(self) -> EngineCoreOutputs:
        self._wait(self._output)
        with InterruptsHeld(clean_up=True):  # a message is taken in as a whole
            return self._unpacked(*self._output.recv_multipart())


class _Resources:
    """What must be given back: a folder, sockets, a process. In the process that made them, and only there."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix="minivllm-")
        self._context = zmq.Context()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None

    def bind(self, kind: int, name: str) -> zmq.Socket:
        """A socket in the folder. It drops nothing: however many messages wait, they are kept."""
        socket = self._context.socket(kind)
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    def start(self) -> tuple[subprocess.Popen[bytes], int]:
        """The core's process, and our end of the lifeline: readable as soon as the process has ended."""
        home = str(Path(errors.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        self._lifeline, theirs = os.pipe()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits the mask
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minivllm.engine.core_entry", self._folder, str(theirs), str(self._owner)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                pass_fds=(theirs,),
                env=os.environ | {"PYTHONPATH": path},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(theirs)
        return self._process, self._lifeline

    def end(self) -> None:
        """Lets the process go, kills it if it stays, and gives all else back."""
        if os.getpid() != self._owner:
            return  # a fork
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(SECONDS_TO_LEAVE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
