"""The core's process: its loop in the main thread, its sockets in two other threads.

While a step computes, the GIL is free most of the time, so requests are decoded and outputs encoded meanwhile.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc.run_busy_loop`, `process_input_sockets`,
`process_output_sockets`).
"""

import queue
import threading
from typing import Any

import zmq

from minivllm.core.messages import EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.core_client import UTILITIES
from minivllm.engine.wire import IDENTITY, Failure, Kind, decode, encode
from minivllm.errors import WorkerDiedError

SECONDS_TO_SEND = 2.0


class EngineCoreProc:
    """Says hello to the front end, receives the engine's arguments, creates the core and serves it until it fails."""

    def __init__(self, folder: str) -> None:
        """Connects to the front end's two sockets in `folder`."""
        self.core: EngineCore | None = None
        self._requests: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._input = self._context.socket(zmq.DEALER)
        self._input.identity = IDENTITY
        self._input.connect(f"ipc://{folder}/input")
        self._output = self._context.socket(zmq.PUSH)
        self._output.connect(f"ipc://{folder}/output")

    def run(self) -> int:
        """Does all of that; returns the exit code of the process."""
        self._input.send_multipart((Kind.HELLO, b""))
        _, settings = self._input.recv_multipart()
        socket = self._input
        try:
            self.core = EngineCore(EngineArgs(**decode(settings, dict)))
            self._input.send_multipart((Kind.READY, encode(self.core.ready)))
            threading.Thread(target=self._receive, daemon=True).start()
            sender = threading.Thread(target=self._send, daemon=True)
            sender.start()
            socket = self._output
            self._run_busy_loop(self.core)
        except Exception as error:
            if socket is self._output:
                self._outputs.put(None)
                sender.join(SECONDS_TO_SEND)
            socket.send_multipart((Kind.FAILED, encode(Failure.of(error))))
            self._context.destroy(linger=int(SECONDS_TO_SEND * 1000))
            return 1
        finally:
            self.shutdown()
        return 0

    def shutdown(self) -> None:
        """Ends the ranks. Can be called from any thread."""
        if self.core is not None:
            self.core.shutdown()

    def _run_busy_loop(self, core: EngineCore) -> None:
        """Steps while requests are unfinished, else waits for messages. Raises `WorkerDiedError` if a rank dies."""
        while True:
            while not self._requests.empty() or not core.has_unfinished_requests():
                self._handle(core, *self._requests.get())
            try:
                self._outputs.put(core.step())
            except WorkerDiedError:
                raise
            except Exception:
                continue  # the next step reports the failed requests; the others go on

    def _handle(self, core: EngineCore, kind: bytes, payload: bytes) -> None:
        if kind == Kind.ADD:
            core.add_request(decode(payload, EngineCoreRequest))
        elif kind == Kind.ABORT:
            core.abort_requests(decode(payload, list[str]))
        elif kind == Kind.UTILITY:
            call_id, method = decode(payload, tuple[int, str])
            answer = UtilityOutput(call_id, *_result_of(core, method))
            self._outputs.put(EngineCoreOutputs([], utility_output=answer))

    def _receive(self) -> None:
        while True:
            self._requests.put(self._input.recv_multipart())

    def _send(self) -> None:
        while (outputs := self._outputs.get()) is not None:
            self._output.send_multipart((Kind.OUTPUTS, encode(outputs)))


def _result_of(core: EngineCore, method: str) -> tuple[Any, str | None]:
    """Returns `(result, None)` of a method of the core, or `(None, error message)`."""
    if method not in UTILITIES:
        return None, f"there is no utility {method!r}"
    try:
        return getattr(core, method)(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
