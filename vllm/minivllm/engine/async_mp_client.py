"""The client of a core in a separate process for an event loop: nothing here blocks once the core is ready.

Sending never waits, since the sockets keep whatever has not gone out yet. Receiving is one task; it ends with the core.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`AsyncMPClient`).
"""

import asyncio
from typing import Any

import zmq.asyncio

from minivllm.core.messages import EngineCoreOutputs
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_client import UTILITIES
from minivllm.engine.mp_client import MPClient
from minivllm.engine.wire import Kind
from minivllm.errors import EngineDeadError

SECONDS_FOR_LAST_WORDS = 0.1
"""How long a core that has ended may still be heard: its last message may lie in the socket."""


class AsyncMPClient(MPClient):
    """For `AsyncLLM`. The constructor blocks until the core is ready; all else belongs to one running event loop."""

    def __init__(self, args: EngineArgs) -> None:
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._messages: zmq.asyncio.Socket | None = None
        self._ended: asyncio.Future[None] | None = None
        super().__init__(args)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Returns the outputs of the next step, whenever there is one.

        Raises:
            EngineDeadError: the core's process has died, or said why it must end.
        """
        while True:
            try:
                outputs = self._unpacked(*await self._next_message())
            except Exception as error:
                self._stop_listening(error)
                raise
            answer = outputs.utility_output
            if answer is None:
                return outputs
            call = self._calls.pop(answer.call_id, None)
            if call is not None and not call.done():
                call.set_result(answer)

    async def call_utility_async(self, method: str) -> Any:
        """Calls one of `UTILITIES` in the core and returns its result; somebody must be reading outputs meanwhile.

        Raises:
            RuntimeError: the method failed.
            EngineDeadError: the core's process has died.
        """
        assert method in UTILITIES
        call_id = next(self._call_ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._send(Kind.UTILITY, (call_id, method))
        answer = await self._calls[call_id]
        if answer.error is not None:
            raise RuntimeError(f"{method} failed in the engine's core: {answer.error}")
        return answer.result

    def get_output(self) -> EngineCoreOutputs:
        """Not for an event loop: see `get_output_async`."""
        raise NotImplementedError

    def call_utility(self, method: str) -> Any:
        """Not for an event loop: see `call_utility_async`."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """See `EngineCoreClient`. Calls under way fail."""
        self._stop_listening(EngineDeadError("the engine has been shut down"))
        super().shutdown()

    def _stop_listening(self, error: Exception) -> None:
        """Takes the sockets away from the loop before they are closed; calls under way fail with this error."""
        if self._ended is not None and not self._ended.get_loop().is_closed():
            self._ended.get_loop().remove_reader(self._lifeline)
            if self._messages is not None:
                self._messages.close()
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(error)
        self._calls.clear()

    def _unreachable(self) -> Exception:
        """Whoever receives outputs notices the core's end too, and gives everything back."""
        return EngineDeadError(f"the engine's core (process {self.process.pid}) has ended")

    async def _next_message(self) -> list[bytes]:
        if self._dead is not None:
            raise self._dead
        if self._messages is None or self._ended is None:
            self._messages, self._ended = self._listen()
        receiving = asyncio.ensure_future(self._messages.recv_multipart())
        try:
            await asyncio.wait({receiving, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                await asyncio.wait({receiving}, timeout=SECONDS_FOR_LAST_WORDS)
            if receiving.done():
                return receiving.result()
        finally:
            receiving.cancel()
        raise self._died()

    def _listen(self) -> tuple[zmq.asyncio.Socket, asyncio.Future[None]]:
        """The socket of outputs for this loop, and a future that is done once the core's process has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            loop.remove_reader(self._lifeline)
            if not ended.done():
                ended.set_result(None)

        loop.add_reader(self._lifeline, end)
        return zmq.asyncio.Socket.from_socket(self._output), ended
