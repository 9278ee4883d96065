"""Talk to cores in separate processes from an event loop: nothing here blocks once the cores are
ready.

Sending never waits, since the sockets keep whatever has not gone out yet. Receiving is one task,
which ends with a core.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`AsyncMPClient`, `DPLBAsyncMPClient`).
"""

import asyncio
import socket
import time
from typing import Any

import zmq.asyncio

from minivllm.core.engine_messages import EngineCoreOutputs, UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import joined_answers
from minivllm.engine.mp_client import MILLISECONDS_FOR_LAST_WORDS, MPClient
from minivllm.engine.socket_messages import Kind, decode
from minivllm.errors import EngineDeadError


class AsyncMPClient(MPClient):
    """A client for `AsyncLLM`. Its constructor blocks until the cores are ready; everything else
    runs in one event loop.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._calls: dict[tuple[int, int], asyncio.Future[UtilityOutput]] = {}
        self._pings: dict[int, float] = {}
        """Rank -> the time at which its unanswered ping was sent."""
        self._messages: zmq.asyncio.Socket | None = None
        self._death: asyncio.Future[int] | None = None
        """Gets the rank of the core whose process is the first to end."""
        super().__init__(args)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the outputs of the next step of any core, and return them.

        Raises:
            EngineDeadError: a core has died, or reported why it must end. The others are told to leave.
        """
        while True:
            try:
                kind, payload = await self._next_message()
                if kind == Kind.PING:
                    del self._pings[decode(payload, int)]
                    continue
                outputs = self._unpacked(kind, payload)
            except Exception as error:
                # The loop must let go of the sockets before their owner closes them.
                self._stop_listening(error)
                self.cores.tell_to_leave()
                raise
            answer = outputs.utility_output
            if answer is None:
                return outputs
            call = self._calls.pop((answer.call_id, outputs.engine_index), None)
            if call is not None and not call.done():
                call.set_result(answer)

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        """Call a method of every core by name and return the result; a task must be reading
        outputs meanwhile.

        Raises:
            MinivllmError: the arguments are invalid.
            RuntimeError: the method failed.
            EngineDeadError: a core's process has died meanwhile.
        """
        call_id = self._send_call(method, arguments)
        calls = [asyncio.get_running_loop().create_future() for _ in self.engines]
        self._calls |= {(call_id, rank): call for rank, call in enumerate(calls)}
        return joined_answers(method, await asyncio.gather(*calls))

    def seconds_silent(self) -> float:
        """Return the age of the oldest ping that a core has not answered, and ping the other cores;
        a task must be reading outputs meanwhile.

        The thread that receives a core's messages answers, so a long step silences no core.
        """
        now = time.monotonic()
        for rank in range(len(self.engines)):
            if rank not in self._pings:
                self._send(Kind.PING, None, rank)
                self._pings[rank] = now
        return now - min(self._pings.values())

    def shutdown(self) -> None:
        """Stop the cores. Calls in progress fail."""
        self._stop_listening(EngineDeadError("the engine has been shut down"))
        super().shutdown()

    def _stop_listening(self, error: Exception) -> None:
        """Take the sockets out of the event loop before they are closed; calls in progress fail
        with this error.
        """
        if self._death is not None and not self._death.get_loop().is_closed():
            for lifeline in self.cores.lifelines:
                self._death.get_loop().remove_reader(lifeline)
            if self._messages is not None:
                self._messages.close()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(error)
        self._calls.clear()

    def _unreachable(self, rank: int) -> None:
        """Fail only this message: the task that receives outputs will notice that the core has
        ended and read its last message.
        """
        raise EngineDeadError("the engine's core has ended")

    async def _next_message(self) -> list[bytes]:
        if self._dead is not None:
            raise self._dead
        if self._messages is None or self._death is None:
            self._messages, self._death = self._listen()
        if not self._death.done():
            receiving = asyncio.ensure_future(self._messages.recv_multipart())
            try:
                await asyncio.wait({receiving, self._death}, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    return receiving.result()
            finally:
                receiving.cancel()
        self._dead = EngineDeadError(self.cores.obituary(self._death.result()))
        raise self._dead

    def _listen(self) -> tuple[zmq.asyncio.Socket, "asyncio.Future[int]"]:
        """Return the outputs' socket, bound to this event loop, and a future of the first core to
        end.
        """
        loop = asyncio.get_running_loop()
        death: asyncio.Future[int] = loop.create_future()

        def end(lifeline: socket.socket, rank: int) -> None:
            loop.remove_reader(lifeline)
            # Its last message, which says why, may still be on its way.
            loop.call_later(MILLISECONDS_FOR_LAST_WORDS / 1000, lambda: death.done() or death.set_result(rank))

        for rank, lifeline in enumerate(self.cores.lifelines):
            loop.add_reader(lifeline, end, lifeline, rank)
        return zmq.asyncio.Socket.from_socket(self._output), death
