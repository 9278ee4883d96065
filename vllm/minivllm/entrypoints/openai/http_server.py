"""A server's process, whatever it serves: its socket, its signals, and its shutdown.

The socket is bound before anything else is done, so that a port in use is reported at once. Signals
are handled here and not by uvicorn: a first SIGTERM or Ctrl-C lets open requests finish for as long
as the settings allow, then ends them with an error; a second one does not wait. When the backend
dies, the server answers for a moment longer to tell clients, and then ends too.

In vLLM v0.33.0: `vllm/entrypoints/launchers/`.
"""

import asyncio
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from minivllm.entrypoints.openai.middleware import ServerState
from minivllm.entrypoints.openai.settings import HttpArgs
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_TELL = 1.0
"""How long a server without an engine still answers, so that clients and probes learn of it."""
SECONDS_TO_CLOSE = 1
"""How long connections have to take their last bytes."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Backend(Protocol):
    """The part behind the routes: `AsyncLLM`, or a proxy's servers."""

    @property
    def dead_error(self) -> Exception | None:
        """The reason why the backend has ended; None while it is alive."""

    async def wait_until_dead(self) -> None:
        """Wait until the backend has ended."""

    def end_requests(self) -> None:
        """End unfinished requests with an error."""


def bind(settings: HttpArgs) -> socket.socket:
    """Open the listening socket and return it.

    Raises:
        MinivllmError: the port is in use, or the host is not this machine's.
    """
    address, is_ipv6 = (settings.host or "", settings.port), ":" in (settings.host or "")
    family, is_dual = socket.AF_INET6 if is_ipv6 else socket.AF_INET, is_ipv6 and socket.has_dualstack_ipv6()
    try:
        # A server that is restarted gets its port back at once.
        return socket.create_server(address, family=family, dualstack_ipv6=is_dual, backlog=2048)
    except (OSError, OverflowError) as error:
        where = f"{settings.host or '*'}:{settings.port}"
        raise MinivllmError(f"cannot listen on {where}: {error}; choose another --port or --host") from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of the server for clients on this machine."""
    host, port = listening.getsockname()[:2]
    host = "localhost" if host in ("0.0.0.0", "::") else host  # all of this machine's addresses
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, settings: HttpArgs, protocol: Any = "auto") -> uvicorn.Server:
    """Return a server for these routes, which `serve(sockets=...)` starts. `protocol` is uvicorn's
    implementation of HTTP/1.1.
    """
    level, logs = settings.uvicorn_log_level, not settings.disable_uvicorn_access_log
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_level=level, access_log=logs)
    config.timeout_graceful_shutdown = SECONDS_TO_CLOSE
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]  # `until_the_end` handles them
    return server


async def until_the_end(app: FastAPI, backend: Backend, listening: socket.socket, settings: HttpArgs) -> int:
    """Serve on this socket until a signal arrives or the backend ends; return the exit code.
    `app.state.server` holds the open requests.
    """
    server, state = make_server(app, settings), app.state.server
    _allow_many_connections()
    logging.getLogger("uvicorn.error").addFilter(_is_not_about_tasks)
    asked = asyncio.Semaphore(0)  # released once per signal, and locked until then
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, asked.release)
    logger.info("Serving on %s", address_of(listening))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    dying, stopping = asyncio.create_task(backend.wait_until_dead()), asyncio.create_task(asked.acquire())
    await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = int(dying.done())
    if dying.done():
        logger.error("The engine has ended: %s", backend.dead_error)
        # Clients and probes that come now get a 503 rather than a refused connection.
        await asyncio.wait({serving}, timeout=SECONDS_TO_TELL)
    elif stopping.done():
        state.draining = True
        logger.info("Shutting down: %d requests are open", state.num_open)
        # A second signal ends this wait, and so does the backend's death.
        await _drain(state, settings.shutdown_timeout, lambda: dying.done() or not asked.locked())
        code = int(dying.done())  # `end_requests` ends the backend
        backend.end_requests()
        # uvicorn tells open requests that their client has left: they send their last events
        # before.
        await _drain(state, SECONDS_TO_CLOSE, lambda: not asked.locked())
    # uvicorn closes idle connections and waits for the others.
    server.should_exit = True
    await asyncio.wait({serving}, timeout=2 * SECONDS_TO_CLOSE)
    # Connections that have not closed by now are cut off.
    server.force_exit = True
    for task in (dying, stopping):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    return code


async def _drain(state: ServerState, seconds: float, is_over: Callable[[], bool]) -> None:
    """Wait up to `seconds` for open requests to finish, or until this wait is over."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while state.num_open and loop.time() < end and not is_over():
        await asyncio.sleep(0.02)


@contextmanager
def signals_end_the_start() -> Generator[None, None, None]:
    """Exit with code 0 on a signal that arrives before the engine is ready."""
    before = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as the system allows: each connection uses one."""
    # Many systems allow 1,024 by default.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _is_not_about_tasks(record: logging.LogRecord) -> bool:
    """Filter out the traceback that uvicorn logs for each task that it cancels at shutdown."""
    is_cancelled = isinstance((record.exc_info or (None, None))[1], asyncio.CancelledError)
    return not (is_cancelled and "Exception in ASGI application" in record.getMessage())
