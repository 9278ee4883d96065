"""Talk to cores in separate processes: send to them, receive from them, notice when they end.

A client starts the cores (`core_process_manager.py`) and has two sockets. One sends requests,
addressed to a core's identity; the other receives the outputs of all cores (`socket_messages.py`).
A core first says hello on the former and gets the engine's arguments. Each request goes to one core
(`load_balancing.py`), and so does its abort.

`async_mp_client.py` has the client for an event loop.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`MPClient`, `SyncMPClient`, `DPLBAsyncMPClient`).
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import zmq

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreReady, EngineCoreRequest, UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import EngineCoreClient, joined_answers
from minivllm.engine.core_process_manager import CoreProcesses
from minivllm.engine.load_balancing import LoadBalancer
from minivllm.engine.socket_messages import Failure, Kind, decode, encode, identity
from minivllm.errors import EngineDeadError
from minivllm.platforms.interrupts import InterruptsHeld

MILLISECONDS_FOR_LAST_WORDS = 500
"""How long a core that has ended may still be heard: its last message may be on its way."""


class MPClient(EngineCoreClient):
    """The sockets and the processes of all cores. When one core ends, the engine ends.

    Raises:
        MinivllmError: a core rejects the arguments.
        EngineDeadError: a core's process died before it was ready.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._dead: Exception | None = None
        self._call_ids = itertools.count()
        self.cores = CoreProcesses(args)
        self._finalizer = weakref.finalize(self, self.cores.end)
        try:
            self._input = self.cores.bind(zmq.ROUTER, "input")
            # Fail when a core is gone, rather than drop the message silently.
            self._input.router_mandatory = True
            self._output = self.cores.bind(zmq.PULL, "output")
            self.cores.start()
            self._ranks_by_lifeline = {end.fileno(): rank for rank, end in enumerate(self.cores.lifelines)}
            self.engines = self._meet(args)
            self.cores.remove_folder()
        except BaseException:
            self.shutdown()
            raise
        self._balancer = LoadBalancer(len(self.engines))
        self._rank_of: dict[str, int] = {}
        """The core of each unfinished request."""

    def add_request(self, request: EngineCoreRequest) -> None:
        # The statistics of a request are those of its core.
        rank = request.data_parallel_rank = self._balancer.choose(request)
        self._rank_of[request.request_id] = rank
        self._send(Kind.ADD, request, rank)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; outputs already on their way still arrive, and the caller must ignore
        them.
        """
        if self._dead is not None:
            return
        by_rank: dict[int, list[str]] = {}
        for request_id in request_ids:
            rank = self._rank_of.pop(request_id, None)
            if rank is not None:
                by_rank.setdefault(rank, []).append(request_id)
        for rank, ids in by_rank.items():
            self._send(Kind.ABORT, ids, rank)

    def _send_call(self, method: str, arguments: tuple[Any, ...]) -> int:
        """Ask every core to call a utility; return the id that identifies their answers."""
        call_id = next(self._call_ids)
        for rank in range(len(self.engines)):
            self._send(Kind.UTILITY, (call_id, method, arguments), rank)
        return call_id

    def shutdown(self) -> None:
        self._dead = self._dead or EngineDeadError("the engine has been shut down")
        self._finalizer()

    def _meet(self, args: EngineArgs) -> list[EngineCoreReady]:
        """Send each core the engine's arguments when it says hello, and wait until all are ready."""
        settings = {field.name: getattr(args, field.name) for field in fields(args)}
        del settings["parts"]  # Python objects; EngineArgs has refused any
        size = len(self.cores.processes)
        engines: dict[int, EngineCoreReady] = {}
        while len(engines) < size:
            # One core may refuse its arguments while another has not said hello.
            self._wait(self._output, self._input)
            if self._output.poll(0):
                kind, payload = self._output.recv_multipart()
                if kind == Kind.FAILED:
                    raise decode(payload, Failure).error()
                rank, engine = decode(payload, tuple[int, EngineCoreReady])
                engines[rank] = engine
            else:
                name, _ = self._input.recv_multipart()
                self._input.send_multipart((name, encode((settings, size))))
        return [engines[rank] for rank in range(size)]

    def _send(self, kind: bytes, message: Any, rank: int = 0) -> None:
        if self._dead is not None:
            raise self._dead
        try:
            with InterruptsHeld(clean_up=True):  # a message is sent as a whole
                self._input.send_multipart((identity(rank), kind, encode(message)))
        except zmq.ZMQError:  # the core has closed its end
            self._unreachable(rank)

    def _unpacked(self, kind: bytes, payload: bytes) -> EngineCoreOutputs:
        """Return the outputs in a core's message, or raise the failure if it is the core's last
        message.
        """
        if kind == Kind.FAILED:
            self._dead = decode(payload, Failure).error()
            raise self._dead
        outputs = decode(payload, EngineCoreOutputs)
        if outputs.scheduler_stats is not None:
            self._balancer.observe(outputs.engine_index, outputs.scheduler_stats, outputs.num_received)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._rank_of.pop(output.request_id, None)
        return outputs

    def _wait(self, *sockets: zmq.Socket) -> None:
        """Wait for the next message on any of the sockets, or raise `EngineDeadError` if a core's process has ended
        without one.
        """
        if self._dead is not None:
            raise self._dead
        poller = zmq.Poller()
        for source in (*sockets, *self._ranks_by_lifeline):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll())
        # A message goes before a death: it may say why the core has ended.
        if not ready.keys() & set(sockets) and not sockets[0].poll(MILLISECONDS_FOR_LAST_WORDS):
            raise self._died(next(rank for fd, rank in self._ranks_by_lifeline.items() if fd in ready))

    def _unreachable(self, rank: int) -> None:
        raise self._died(rank)

    def _died(self, rank: int) -> Exception:
        """Shut the engine down after a core's process has ended; return the error that describes
        it.
        """
        self._dead = EngineDeadError(self.cores.obituary(rank))
        self._finalizer()
        return self._dead


class SyncMPClient(MPClient):
    """A blocking client, for `LLM`."""

    def __init__(self, args: EngineArgs) -> None:
        self._early: list[EngineCoreOutputs] = []
        super().__init__(args)

    def get_output(self) -> EngineCoreOutputs:
        return self._early.pop(0) if self._early else self._receive()

    def call_utility(self, method: str, *arguments: Any) -> Any:
        """Call a utility in every core. Outputs that arrive before the replies are kept for
        `get_output`.
        """
        call_id = self._send_call(method, arguments)
        answers: dict[int, UtilityOutput] = {}
        while len(answers) < len(self.engines):
            # Answers and outputs share one socket, so outputs may come first.
            message = self._receive()
            answer = message.utility_output
            if answer is None:
                self._early.append(message)
            elif answer.call_id == call_id:  # other replies belong to interrupted calls
                answers[message.engine_index] = answer
        return joined_answers(method, [answers[rank] for rank in sorted(answers)])

    def _receive(self) -> EngineCoreOutputs:
        self._wait(self._output)
        with InterruptsHeld(clean_up=True):  # a message is taken in as a whole
            return self._unpacked(*self._output.recv_multipart())
