"""The core's process: its loop (`busy_loop`) in the main thread, its sockets in two other threads.

While a step computes, the GIL is free most of the time, so requests are decoded and outputs encoded meanwhile.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCoreProc`, `process_input_sockets`, `process_output_sockets`).
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import zmq

from minivllm.core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from minivllm.core.stats import SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.busy_loop import Act, abort_requests, run_busy_loop, tell_step_events
from minivllm.engine.core import EngineCore
from minivllm.engine.core_client import UTILITIES
from minivllm.engine.core_sockets import CoreSockets
from minivllm.engine.wire import Failure, Kind, decode, encode, identity
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger
from minivllm.platforms.device import pick_device

logger = init_logger(__name__)
SECONDS_TO_SEND = 2.0


class EngineCoreProc:
    """Says hello, receives the engine's arguments, creates the core, and serves its clients until it fails."""

    def __init__(self, sockets: CoreSockets, rank: int = 0) -> None:
        """`sockets` are those of who starts it and of its clients; `rank` is its own among the cores."""
        self.core: EngineCore | None = None
        self._rank = rank
        self._sockets = sockets
        self._context, self._input_context = zmq.Context(), zmq.Context()
        self._to_do: queue.SimpleQueue[Act | Exception | None] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | Failure] = queue.SimpleQueue()
        self._inputs: list[zmq.Socket] = []
        self._output_sockets: list[zmq.Socket] = []
        self._router = OutputRouter(rank, 1)

    def run(self) -> int:
        """Does all of that; returns the exit code of the process."""
        handshake = self._connected(zmq.DEALER, "handshake")
        handshake.send_multipart((Kind.HELLO, b""))
        _, payload = handshake.recv_multipart()
        settings, client_count, num_neighbours = decode(payload, tuple[dict, int, int])
        try:
            self.core = EngineCore(_share(settings, num_neighbours))
            self.core.executor.collective_rpc("warm_up")
        except Exception as error:
            if not isinstance(error, MinivllmError):
                logger.exception("The engine's core could not start")
            handshake.send_multipart((Kind.FAILED, encode(Failure.of(error))))
            handshake.close()
            self._context.term()  # waits until that is sent: the process ends without taking anything apart
            return 1
        self._connect_to_clients(client_count)
        handshake.send_multipart((Kind.READY, encode(self.core.ready)))
        sender = threading.Thread(target=self._send, daemon=True)
        threading.Thread(target=self._receive, daemon=True).start()
        sender.start()
        try:
            run_busy_loop(self.core, self._to_do, self._put)
        except Exception as error:
            self._outputs.put(Failure.of(error, self._rank))
            sender.join(SECONDS_TO_SEND)
            if not sender.is_alive():
                handshake.close()
                self._context.term()
        finally:
            self.shutdown()
        return 1

    def shutdown(self) -> None:
        """Ends the ranks. Can be called from any thread."""
        if self.core is not None:
            self.core.shutdown()

    def _handle(self, client: int, kind: bytes, payload: bytes) -> None:
        core = self.core
        assert core is not None
        if kind == Kind.ADD:
            request = decode(payload, EngineCoreRequest)
            self._router.note_added(client, request.request_id)
            core.add_request(request)
        elif kind == Kind.ABORT:
            request_ids = decode(payload, list[str])
            self._router.note_aborted(request_ids)
            abort_requests(core, request_ids, self._put)
        elif kind == Kind.UTILITY:
            call_id, method, arguments = decode(payload, tuple[int, str, list[Any]])
            answer = _answer_of(core, call_id, method, arguments)
            tell_step_events(core, self._put)  # whoever has the answer has them too
            self._outputs.put((client, EngineCoreOutputs([], utility_output=answer, engine_index=self._rank)))

    def _put(self, outputs: EngineCoreOutputs) -> None:
        for share in self._router.shares(outputs):
            self._outputs.put(share)

    def _receive(self) -> None:
        """One of the two socket threads; what ends it ends the loop too, rather than leave the front end waiting."""
        poller = zmq.Poller()
        clients = {socket: client for client, socket in enumerate(self._inputs)}
        for socket in clients:
            poller.register(socket, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    kind, payload = socket.recv_multipart()
                    self._to_do.put(partial(self._handle, clients[socket], kind, payload))
        except Exception as error:
            self._to_do.put(error)

    def _send(self) -> None:
        """The other one. Its last message to every client is why the core has failed."""
        try:
            while not isinstance(share := self._outputs.get(), Failure):
                client, outputs = share
                self._output_sockets[client].send_multipart((Kind.OUTPUTS, encode(outputs)))
        except Exception as error:
            self._to_do.put(error)
            share = Failure.of(error, self._rank)
        for socket in self._output_sockets:
            socket.send_multipart((Kind.FAILED, encode(share)))
            socket.close()

    def _connect_to_clients(self, count: int) -> None:
        self._router = OutputRouter(self._rank, count)
        for client in range(count):
            self._output_sockets.append(self._connected(zmq.PUSH, f"output-{client}"))
            self._inputs.append(self._connected(zmq.DEALER, f"input-{client}", self._input_context))
            self._inputs[client].send_multipart((Kind.HELLO, b""))

    def _connected(self, kind: int, name: str, context: zmq.Context | None = None) -> zmq.Socket:
        """A socket that drops nothing, however many messages wait."""
        socket = (context or self._context).socket(kind)
        socket.identity = identity(self._rank)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = int(SECONDS_TO_SEND * 1000)
        self._sockets.connect(socket, name)
        return socket


class OutputRouter:
    """Gives each client the outputs of its own requests, and to all of them the scheduler's state and step events."""

    def __init__(self, rank: int, client_count: int) -> None:
        self._rank = rank
        self._client_of: dict[str, int] = {}
        self._num_received = [0] * client_count
        self._told: list[SchedulerStats | None] = [None] * client_count

    def note_added(self, client: int, request_id: str) -> None:
        """This client has sent a request."""
        self._client_of[request_id] = client
        self._num_received[client] += 1

    def note_aborted(self, request_ids: Iterable[str]) -> None:
        """These requests have no further outputs."""
        for request_id in request_ids:
            self._client_of.pop(request_id, None)

    def shares(self, outputs: EngineCoreOutputs) -> Iterator[tuple[int, EngineCoreOutputs]]:
        """Yields (client, what it is told); one without outputs is told only of a changed state, or of step events.

        What the KV connector has counted is told to the first one alone.
        """
        outputs.engine_index = self._rank
        if len(self._told) == 1:
            outputs.num_received = self._num_received[0]
            for output in outputs.outputs:
                self._forget_finished(output)
            yield 0, outputs
            return
        own: list[list[EngineCoreOutput]] = [[] for _ in self._told]
        for output in outputs.outputs:
            client = self._client_of.get(output.request_id)
            if client is not None:
                own[client].append(output)
                self._forget_finished(output)
        for client, received in enumerate(self._num_received):
            counted = None if client else outputs.kv_connector_stats
            if own[client] or outputs.step_events or counted or outputs.scheduler_stats != self._told[client]:
                self._told[client] = outputs.scheduler_stats
                told = replace(outputs, outputs=own[client], num_received=received, kv_connector_stats=counted)
                yield client, told

    def _forget_finished(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is not None:
            self._client_of.pop(output.request_id, None)


def _share(settings: Mapping[str, Any], num_cores: int) -> EngineArgs:
    """The arguments of one of several cores on this machine, which share its CPU's threads and memory."""
    args = EngineArgs(**settings)
    if num_cores == 1 or pick_device(args.device).type != "cpu":
        return args
    torch.set_num_threads(max(1, torch.get_num_threads() // num_cores))
    return replace(args, gpu_memory_utilization=args.gpu_memory_utilization / num_cores)


def _answer_of(core: EngineCore, call_id: int, method: str, arguments: Sequence[Any]) -> UtilityOutput:
    """Returns the result of a method of the core, or its error."""
    if method not in UTILITIES:
        return UtilityOutput(call_id, error=f"there is no utility {method!r}")
    try:
        return UtilityOutput(call_id, getattr(core, method)(*arguments))
    except MinivllmError as error:
        return UtilityOutput(call_id, error=str(error), invalid_request=True)
    except Exception as error:
        return UtilityOutput(call_id, error=f"{type(error).__name__}: {error}")
