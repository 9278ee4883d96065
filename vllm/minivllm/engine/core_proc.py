"""The core's process: its loop in the main thread, its sockets in two other threads.

While a step computes, the GIL is free most of the time, so requests are decoded and outputs encoded meanwhile.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc.run_busy_loop`, `process_input_sockets`,
`process_output_sockets`).
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import zmq

from minivllm.core.messages import EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.core_client import UTILITIES
from minivllm.engine.wire import IDENTITY, Failure, Kind, decode, encode
from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_SEND = 2.0


class EngineCoreProc:
    """Says hello to the front end, receives the engine's arguments, creates the core and serves it until it fails."""

    def __init__(self, folder: str) -> None:
        """Connects to the front end's two sockets in `folder`."""
        self.core: EngineCore | None = None
        self._requests: queue.SimpleQueue[list[bytes] | Exception] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | Failure] = queue.SimpleQueue()
        context = zmq.Context()
        self._input, self._output = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        self._input.identity = IDENTITY
        for socket, name in ((self._input, "input"), (self._output, "output")):
            socket.sndhwm = socket.rcvhwm = 0  # nothing is dropped, however many messages wait
            socket.linger = int(SECONDS_TO_SEND * 1000)
            socket.connect(f"ipc://{folder}/{name}")

    def run(self) -> int:
        """Does all of that; returns the exit code of the process."""
        self._input.send_multipart((Kind.HELLO, b""))
        _, settings = self._input.recv_multipart()
        try:
            self.core = EngineCore(EngineArgs(**decode(settings, dict)))
        except Exception as error:
            if not isinstance(error, MinivllmError):
                logger.exception("The engine's core could not start")
            self._input.send_multipart((Kind.FAILED, encode(Failure.of(error))))
            self._input.close()
            return 1
        self._input.send_multipart((Kind.READY, encode(self.core.ready)))
        sender = threading.Thread(target=self._send, daemon=True)
        threading.Thread(target=self._receive, daemon=True).start()
        sender.start()
        try:
            self.run_busy_loop(self.core)
        except Exception as error:
            self._outputs.put(Failure.of(error))
            sender.join(SECONDS_TO_SEND)
        finally:
            self.shutdown()
        return 1

    def shutdown(self) -> None:
        """Ends the ranks. Can be called from any thread."""
        if self.core is not None:
            self.core.shutdown()

    def run_busy_loop(self, core: EngineCore) -> None:
        """Steps while requests are unfinished, else waits for messages. Raises what the engine cannot survive."""
        while True:
            while not self._requests.empty() or not core.has_unfinished_requests():
                message = self._requests.get()
                if isinstance(message, Exception):
                    raise message
                self._guarded(self._handle, core, *message)
            self._guarded(lambda: self._outputs.put(core.step()))

    def _guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        """Only a rank's end is the engine's: after any other failure the core has started over, and goes on."""
        try:
            act(*arguments)
        except WorkerDiedError:
            raise
        except Exception:
            logger.exception("The engine's core goes on after a failure")

    def _handle(self, core: EngineCore, kind: bytes, payload: bytes) -> None:
        if kind == Kind.ADD:
            core.add_request(decode(payload, EngineCoreRequest))
        elif kind == Kind.ABORT:
            core.abort_requests(decode(payload, list[str]))
            if not core.has_unfinished_requests():  # no step will tell the front end that the blocks are free
                self._outputs.put(
                    EngineCoreOutputs([], core.scheduler.make_stats(), step_events=core.take_step_events())
                )
        elif kind == Kind.UTILITY:
            call_id, method = decode(payload, tuple[int, str])
            answer = UtilityOutput(call_id, *_result_of(core, method))
            self._outputs.put(EngineCoreOutputs([], utility_output=answer))
            if events := core.take_step_events():
                self._outputs.put(EngineCoreOutputs([], core.scheduler.make_stats(), step_events=events))

    def _receive(self) -> None:
        """One of the two socket threads; what ends it ends the loop too, rather than leave the front end waiting."""
        try:
            while True:
                self._requests.put(self._input.recv_multipart())
        except Exception as error:
            self._requests.put(error)

    def _send(self) -> None:
        """The other one. Its last message is why the core has failed."""
        try:
            while not isinstance(outputs := self._outputs.get(), Failure):
                self._output.send_multipart((Kind.OUTPUTS, encode(outputs)))
        except Exception as error:
            self._requests.put(error)
            outputs = Failure.of(error)
        self._output.send_multipart((Kind.FAILED, encode(outputs)))
        self._output.close()


def _result_of(core: EngineCore, method: str) -> tuple[Any, str | None]:
    """Returns `(result, None)` of a method of the core, or `(None, error message)`."""
    if method not in UTILITIES:
        return None, f"there is no utility {method!r}"
    try:
        return getattr(core, method)(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
