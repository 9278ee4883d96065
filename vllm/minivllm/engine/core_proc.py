"""Run a core in its own process: its loop (`busy_loop`) in the main thread, its sockets in two
other threads.

While a step computes, the GIL is free most of the time, so requests are decoded and outputs encoded
meanwhile.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc`, `process_input_sockets`,
`process_output_sockets`).
"""

import queue
import socket
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
from minivllm.engine.socket_messages import Failure, Kind, decode, encode, identity
from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.logger import init_logger
from minivllm.platforms.device import pick_device

logger = init_logger(__name__)
SECONDS_TO_SEND = 2.0


class EngineCoreProc:
    """A core in a process of its own: says hello, receives the engine's arguments, creates the
    core, and serves its client until the core fails.
    """

    def __init__(self, folder: str, rank: int = 0) -> None:
        """Take the folder of the front end's sockets, and the core's rank."""
        self.core: EngineCore | None = None
        self._rank = rank
        self._folder = folder
        # The receiving socket has a context of its own: it is never closed, and would keep the
        # other context from ending.
        self._context = zmq.Context()
        self._input_context = zmq.Context()
        self._to_do: queue.SimpleQueue[Act | Exception | None] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[tuple[bytes, Any]] = queue.SimpleQueue()
        self._num_received = 0

    def run(self) -> int:
        """Create the core with the arguments that the front end sends, and serve its client; return
        the exit code of the process.
        """
        inputs = self._connected(zmq.DEALER, "input", self._input_context)
        output = self._connected(zmq.PUSH, "output", self._context)
        inputs.send(Kind.HELLO)
        settings, num_cores = decode(inputs.recv(), tuple[dict, int])
        # Outputs are encoded and sent beside the loop, which can begin the next step.
        sender = threading.Thread(target=self._send, args=(output,), daemon=True)
        sender.start()
        try:
            self.core = EngineCore(_share(settings, num_cores))
            # Compile kernels before the first request has to wait for them.
            self.core.executor.collective_rpc("warm_up")
            self._to_send.put((Kind.READY, (self._rank, self.core.ready)))
            threading.Thread(target=self._receive, args=(inputs,), daemon=True).start()
            run_busy_loop(self.core, self._to_do, self._put)
        except Exception as error:
            if not isinstance(error, MinivllmError | WorkerDiedError):
                logger.exception("The engine's core has failed")
            # The last message of a core says why it ends.
            self._to_send.put((Kind.FAILED, Failure.of(error)))
            sender.join(SECONDS_TO_SEND)
            if not sender.is_alive():
                self._context.term()  # waits until that is sent
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
        self._to_send.put((Kind.OUTPUTS, outputs))

    def _receive(self, socket: zmq.Socket) -> None:
        """Queue incoming messages, in a thread. If it fails, the loop ends too, so that the front
        end does not wait in vain.
        """
        try:
            while True:
                kind, payload = socket.recv_multipart()
                if kind == Kind.PING:  # the loop may be in a long step
                    self._to_send.put((kind, self._rank))
                else:
                    self._to_do.put(partial(self._handle, kind, payload))
        except Exception as error:
            self._to_do.put(error)

    def _send(self, socket: zmq.Socket) -> None:
        """Send messages, in a thread, until the one that says why the core has failed."""
        kind = b""
        while kind != Kind.FAILED:
            kind, message = self._to_send.get()
            try:
                payload = encode(message)
            except Exception as error:
                self._to_do.put(error)
                continue
            socket.send_multipart((kind, payload))
        socket.close()

    def _connected(self, kind: int, name: str, context: zmq.Context) -> zmq.Socket:
        """Return a connected socket that drops nothing, however many messages wait."""
        socket = context.socket(kind)
        socket.identity = identity(self._rank)
        socket.sndhwm = socket.rcvhwm = 0
        # Give the last message time to go out, but not for ever.
        socket.linger = int(SECONDS_TO_SEND * 1000)
        socket.connect(f"ipc://{self._folder}/{name}")
        return socket


_processes: list[EngineCoreProc] = []
"""The one of this process, once it is made."""


def serve(lifeline: socket.socket, folder: str, rank: str) -> int:
    """Run the core until it fails; return the exit code. The lifeline hangs up with this process."""
    _processes.append(EngineCoreProc(folder, int(rank)))
    return _processes[0].run()


def end() -> None:
    """Shut the core down, because the front end has ended or left."""
    for process in _processes:
        process.shutdown()


def _share(settings: Mapping[str, Any], num_cores: int) -> EngineArgs:
    """Return a core's arguments, with its share of this machine's CPU threads and memory."""
    args = EngineArgs(**settings)
    if num_cores == 1 or pick_device(args.device).type != "cpu":
        return args
    # Several cores with all threads each would only take turns on the same processors.
    torch.set_num_threads(max(1, torch.get_num_threads() // num_cores))
    return replace(args, gpu_memory_utilization=args.gpu_memory_utilization / num_cores)
