"""Run a core in its own process: its loop (`busy_loop`) in the main thread, its sockets in two
other threads.

While a step computes, the GIL is free most of the time, so requests are decoded and outputs encoded
meanwhile.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc`, `process_input_sockets`,
`process_output_sockets`).
"""

import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import zmq

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.busy_loop import Act, abort_requests, answer_of, run_busy_loop, tell_watchers
from minivllm.engine.core import EngineCore
from minivllm.engine.core_sockets import CoreSockets
from minivllm.engine.socket_messages import Failure, Kind, decode, encode, identity
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger
from minivllm.platforms.device import pick_device

logger = init_logger(__name__)
SECONDS_TO_SEND = 2.0


class EngineCoreProc:
    """A core in a process of its own: says hello, receives the engine's arguments, creates the
    core, and serves its client until the core fails.
    """

    def __init__(self, sockets: CoreSockets, rank: int = 0) -> None:
        """Take the sockets of the front end that starts this core, and the core's rank."""
        self.core: EngineCore | None = None
        self._rank = rank
        self._sockets = sockets
        # The receiving socket has a context of its own: it is never closed, and would keep the
        # other context from ending.
        self._context = zmq.Context()
        self._input_context = zmq.Context()
        self._to_do: queue.SimpleQueue[Act | Exception | None] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[EngineCoreOutputs | Failure] = queue.SimpleQueue()
        self._num_received = 0

    def run(self) -> int:
        """Perform the handshake, create the core and serve its client; return the exit code of the
        process.
        """
        handshake = self._connected(zmq.DEALER, "handshake")
        handshake.send_multipart((Kind.HELLO, b""))
        _, payload = handshake.recv_multipart()
        settings, num_neighbours = decode(payload, tuple[dict, int])
        try:
            self.core = EngineCore(_share(settings, num_neighbours))
            # Compile kernels before the first request has to wait for them.
            self.core.executor.collective_rpc("warm_up")
        except Exception as error:
            if not isinstance(error, MinivllmError):
                logger.exception("The engine's core could not start")
            handshake.send_multipart((Kind.FAILED, encode(Failure.of(error))))
            handshake.close()
            self._context.term()  # waits until that is sent: the process ends without taking anything apart
            return 1
        output = self._connected(zmq.PUSH, "output")
        inputs = self._connected(zmq.DEALER, "input", self._input_context)
        inputs.send_multipart((Kind.HELLO, b""))
        # Only now: the client must find all sockets connected.
        handshake.send_multipart((Kind.READY, encode(self.core.ready)))
        # Outputs are encoded and sent beside the loop, which can begin the next step.
        sender = threading.Thread(target=self._send, args=(output,), daemon=True)
        threading.Thread(target=self._receive, args=(inputs,), daemon=True).start()
        sender.start()
        try:
            run_busy_loop(self.core, self._to_do, self._put)
        except Exception as error:
            # The last message of a core says why it ends.
            self._outputs.put(Failure.of(error))
            sender.join(SECONDS_TO_SEND)
            if not sender.is_alive():
                handshake.close()
                self._context.term()
        finally:
            self.shutdown()
        return 1

    def shutdown(self) -> None:
        """Shut the ranks down. Can be called from any thread."""
        if self.core is not None:
            self.core.shutdown()

    def _handle(self, kind: bytes, payload: bytes) -> None:
        core = self.core
        assert core is not None
        if kind == Kind.ADD:
            self._num_received += 1
            core.add_request(decode(payload, EngineCoreRequest))
        elif kind == Kind.ABORT:
            abort_requests(core, decode(payload, list[str]), self._put)
        elif kind == Kind.UTILITY:
            call_id, method, arguments = decode(payload, tuple[int, str, list[Any]])
            answer = answer_of(core, call_id, method, arguments)
            tell_watchers(core, self._put)  # a caller that has the answer has them too
            self._put(EngineCoreOutputs([], utility_output=answer))

    def _put(self, outputs: EngineCoreOutputs) -> None:
        # The client balances by these counts, and must know which of its requests they include.
        outputs.engine_index, outputs.num_received = self._rank, self._num_received
        self._outputs.put(outputs)

    def _receive(self, socket: zmq.Socket) -> None:
        """Queue incoming messages, in a thread. If it fails, the loop ends too, so that the front
        end does not wait in vain.
        """
        try:
            while True:
                kind, payload = socket.recv_multipart()
                self._to_do.put(partial(self._handle, kind, payload))
        except Exception as error:
            self._to_do.put(error)

    def _send(self, socket: zmq.Socket) -> None:
        """Send outputs, in a thread. The last message says why the core has failed."""
        try:
            while not isinstance(outputs := self._outputs.get(), Failure):
                socket.send_multipart((Kind.OUTPUTS, encode(outputs)))
        except Exception as error:
            self._to_do.put(error)
            outputs = Failure.of(error)
        socket.send_multipart((Kind.FAILED, encode(outputs)))
        socket.close()

    def _connected(self, kind: int, name: str, context: zmq.Context | None = None) -> zmq.Socket:
        """Return a connected socket that drops nothing, however many messages wait."""
        socket = (context or self._context).socket(kind)
        socket.identity = identity(self._rank)
        socket.sndhwm = socket.rcvhwm = 0
        # Give the last message time to go out, but not for ever.
        socket.linger = int(SECONDS_TO_SEND * 1000)
        self._sockets.connect(socket, name)
        return socket


def _share(settings: Mapping[str, Any], num_cores: int) -> EngineArgs:
    """Return a core's arguments, with its share of this machine's CPU threads and memory."""
    args = EngineArgs(**settings)
    if num_cores == 1 or pick_device(args.device).type != "cpu":
        return args
    # Several cores with all threads each would only take turns on the same processors.
    torch.set_num_threads(max(1, torch.get_num_threads() // num_cores))
    return replace(args, gpu_memory_utilization=args.gpu_memory_utilization / num_cores)
