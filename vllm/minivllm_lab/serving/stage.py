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
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM

SECONDS_TO_END = 10.0
SMALL_BUFFER = 4096
"""Bytes that the system keeps for a client of a lesson's server, while asyncio keeps none: a stream
of a second fills this buffer, as a stream of minutes would fill the usual ones.
"""


@dataclass
class RealServer:
    """The `minivllm serve` application on a socket of this process; its core is in another process."""

    port: int
    app: Any

    def num_open(self) -> int:
        """Return the number of currently open requests."""
        return self.app.state.server.num_open


class Stage:
    """An event loop in a thread, and the servers on it; all of them end with the `with` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._tasks: list[asyncio.Task[None]] = []
        self._closers: list[Callable[[], object]] = []
        self._engines: list[AsyncLLM] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS_TO_END)
        for engine in self._engines:
            engine.shutdown()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the stage's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def serve(self, server: Any, core: Any = None) -> int:
        """Start a lesson's server and return its port.

        `server.run()` runs once, `server.handle(reader, writer)` once per connection; `core` is
        closed at the end.
        """
        if core is not None:
            self._closers.append(core.close)
        return self.run(self._serve(server))

    async def _serve(self, server: Any) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.set_write_buffer_limits(0)
            with suppress(ConnectionError, asyncio.IncompleteReadError):  # the client may leave before it has asked
                await server.handle(reader, writer)

        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        self._tasks.append(asyncio.ensure_future(server.run()))
        self._closers.append((await asyncio.start_server(handle, sock=listening)).close)
        return listening.getsockname()[1]

    def start_real_server(self, settings: dict[str, Any]) -> RealServer:
        """Start the server of `minivllm serve`, for an engine with these arguments."""
        args = EngineArgs(**settings, multiprocess=True)
        engine = AsyncLLM(args)
        self._engines.append(engine)
        return self.run(self._start_real(engine, args))

    async def _start_real(self, engine: AsyncLLM, args: EngineArgs) -> RealServer:
        from minivllm.entrypoints.openai.http_server import bind, make_server
        from minivllm.entrypoints.openai.launcher import make_app
        from minivllm.entrypoints.openai.settings import FrontendArgs

        quiet = {"disable_uvicorn_access_log": True, "uvicorn_log_level": "error"}
        settings = FrontendArgs(host="127.0.0.1", port=0, **quiet)
        app = make_app(engine, args, settings, None)
        server, listening = make_server(app, settings), bind(settings)
        self._tasks.append(asyncio.ensure_future(server.serve(sockets=[listening])))
        self._closers.append(lambda: setattr(server, "should_exit", True))
        return RealServer(listening.getsockname()[1], app)

    async def _end(self) -> None:
        for close in self._closers:
            close()
        await asyncio.sleep(0.2)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
