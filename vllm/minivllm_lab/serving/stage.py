"""Servers that run beside a script: an event loop in a thread, so that the script itself can wait, and load them.

with Stage() as stage:
    real = stage.start_real_server({"model": EMBEDDED_MODEL})  # FastAPI, uvicorn, AsyncLLM, a core's process
    port = stage.serve(server)  # anything with `handle` and `run`, on asyncio's streams
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM

SECONDS_TO_END = 10.0
SMALL_BUFFER = 4096
"""Bytes that the system keeps for a client of a lesson's server, and asyncio keeps none: a stream of a second fills
that, as one of minutes would fill the usual buffers."""


class Handler(Protocol):
    """A server on asyncio's streams: `handle` is called for each connection, `run` once."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""

    async def run(self) -> None:
        """Everything else, for ever."""


@dataclass
class RealServer:
    """`minivllm serve`'s application, on a socket of this process; its core is another process."""

    port: int
    engine: AsyncLLM
    app: Any
    server: Any

    def num_open(self) -> int:
        """Requests that are open now."""
        return self.app.state.server.num_open


class Stage:
    """An event loop in a thread, and the servers on it. Ends them, and it, at the end of the block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._real: list[RealServer] = []
        self._cores: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS_TO_END)
        for real in self._real:
            real.engine.shutdown()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the stage's loop, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def serve(self, server: Handler, core: Any = None) -> int:
        """Starts a lesson's server; returns its port. `core`: what it closes at the end."""
        if core is not None:
            self._cores.append(core)
        return self.run(self._serve(server))

    async def _serve(self, server: Handler) -> int:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        self._tasks.append(asyncio.ensure_future(server.run()))
        self._servers.append(await asyncio.start_server(_unless_gone(server), sock=listening))
        return listening.getsockname()[1]

    def start_real_server(self, settings: dict[str, Any]) -> RealServer:
        """Starts the server that `minivllm serve` starts, for an engine with these arguments."""
        args = EngineArgs(**settings, multiprocess=True)
        real = self.run(self._start_real(AsyncLLM(args), args))
        self._real.append(real)
        return real

    async def _start_real(self, engine: AsyncLLM, args: EngineArgs) -> RealServer:
        from minivllm.entrypoints.openai.http_server import bind, make_server
        from minivllm.entrypoints.openai.launcher import make_app
        from minivllm.entrypoints.openai.settings import FrontendArgs

        settings = FrontendArgs(host="127.0.0.1", port=0, disable_uvicorn_access_log=True, uvicorn_log_level="error")
        app = make_app(engine, args, settings, None)
        server, listening = make_server(app, settings), bind(settings)
        self._tasks.append(asyncio.ensure_future(server.serve(sockets=[listening])))
        return RealServer(listening.getsockname()[1], engine, app, server)

    async def _end(self) -> None:
        for real in self._real:
            real.server.should_exit = True
        for server in self._servers:
            server.close()
        for core in self._cores:
            core.close()
        await asyncio.sleep(0.2)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _unless_gone(server: Handler) -> Any:
    """A client that leaves before it has asked is no error of the server's."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await server.handle(reader, writer)

    return handle
