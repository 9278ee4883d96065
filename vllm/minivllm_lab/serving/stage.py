"""Servers that run beside a script: an event loop in a thread, so that the script itself can put
load on them and wait.

with Stage() as stage:
    real = stage.start_real_server({"model": EMBEDDED_MODEL})  # FastAPI, uvicorn, AsyncLLM, a core's process
    port = stage.serve(server)  # anything with `handle` and `run`, on asyncio's streams
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Self

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM

SECONDS_TO_END = 10.0
SMALL_BUFFER = 4096
"""Bytes that the system keeps for a client of a lesson's server, while asyncio keeps none: a stream
of a second fills this buffer, as a stream of minutes would fill the usual ones.
"""


class Stage:
    """An event loop in a thread, and the servers on it; all of them end with the `with` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._servers = AsyncExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._servers.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS_TO_END)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the stage's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def serve(self, server: Any, core: Any = None) -> int:
        """Start a lesson's server and return its port.

        `server.run()` runs once, `server.handle(reader, writer)` once per connection; `core` is
        closed at the end.
        """
        return self.run(self._servers.enter_async_context(_serving(server, core)))

    def start_real_server(self, settings: dict[str, Any]) -> int:
        """Start the server of `minivllm serve` for an engine with these arguments; return its port.

        The engine's core is in another process.
        """
        args = EngineArgs(**settings, multiprocess=True)
        return self.run(self._start_real(AsyncLLM(args), args))

    async def _start_real(self, engine: AsyncLLM, args: EngineArgs) -> int:
        from minivllm_lab.engines.over_http import serving

        self._servers.push_async_callback(asyncio.to_thread, engine.shutdown)
        port, _ = await self._servers.enter_async_context(serving(engine, args))
        return port


@asynccontextmanager
async def _serving(server: Any, core: Any) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client may leave before it has asked
            await server.handle(reader, writer)

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
    running = asyncio.create_task(server.run())
    connections = await asyncio.start_server(handle, sock=listening)
    try:
        yield listening.getsockname()[1]
    finally:
        connections.close()
        await asyncio.sleep(0.1)  # handlers of clients that have just left come to an end
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if core is not None:
            core.close()
