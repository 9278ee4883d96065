"""The server's process: its socket, its signals, its end.

The socket is bound before the engine starts, so that a port in use is said at once. Signals are ours and not uvicorn's:
a first SIGTERM or Ctrl-C lets open requests finish for as long as the settings say, then ends them with an error; a
second one does not wait. When the engine's last core dies, clients are told for a moment, and then the server ends too.

`api_servers.py` has several of these processes over the same cores.

In vLLM v0.33.0: `vllm/entrypoints/launchers/`.
"""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_mp_client import AsyncMPClient
from minivllm.engine.core_processes import CoreAddresses
from minivllm.engine.prometheus import PrometheusStatLogger
from minivllm.entrypoints.openai.api_server import build_app
from minivllm.entrypoints.openai.chat_template import read_template
from minivllm.entrypoints.openai.middleware import ServerState
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.xray.recorder import RecordingFile
from minivllm.entrypoints.xray.routes import open_recordings, watch_steps
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_TELL = 1.0
"""How long a server without an engine still answers, so that clients and probes learn of it."""
SECONDS_TO_CLOSE = 1
"""How long connections have to take their last bytes."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class NoSignalServer(uvicorn.Server):
    """uvicorn's server, which leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield


def bind(settings: FrontendArgs, shared: bool = False) -> socket.socket:
    """Return the listening socket; a shared one is one of several, among which the system distributes connections.

    Raises:
        MinivllmError: the port is in use, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in (settings.host or "") else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((settings.host or "", settings.port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        where = f"{settings.host or '*'}:{settings.port}"
        raise MinivllmError(f"cannot listen on {where}: {error}; choose another --port or --host") from None
    return listening


def serve(args: EngineArgs, settings: FrontendArgs, template: str | None) -> int:
    """Serve until a signal or the engine's end; return the exit code. `template` stands for a model that has none.

    Raises:
        MinivllmError: the arguments are invalid, or the port is in use.
        EngineDeadError: the engine died before it was ready.
    """
    if settings.api_server_count > 1:
        if args.data_parallel_backend == "ray":
            raise MinivllmError(
                f'api_server_count is {settings.api_server_count}; with data_parallel_backend "ray" there is one API '
                "server: leave one of the two out"
            )
        from minivllm.entrypoints.openai.api_servers import serve_with_several

        return serve_with_several(args, settings, template)
    return serve_on(bind(settings), args, settings, template)


def serve_on(
    listening: socket.socket,
    args: EngineArgs,
    settings: FrontendArgs,
    template: str | None,
    addresses: CoreAddresses | None = None,
) -> int:
    """As `serve`, on this socket; `addresses` are of cores that run already, for one of several API servers."""
    engine: AsyncLLM | None = None
    recordings: list[RecordingFile] = []
    try:
        if addresses is None or addresses.client_index == 0:  # one file has one writer
            recordings = open_recordings(settings, args)
        template = read_template(settings.chat_template, args.model) or template
        _allow_many_connections()
        with signals_end_the_start():
            engine = AsyncLLM(args, AsyncMPClient(args, addresses) if addresses else None)
        return _run(_serve(engine, listening, args, settings, template, recordings))
    finally:
        listening.close()
        for recording in recordings:
            recording.close()
        if engine is not None:
            engine.shutdown()


def _run(work) -> int:
    try:
        import uvloop
    except ImportError:  # it has no build for Windows
        return asyncio.run(work)
    return uvloop.run(work)


async def _serve(
    engine: AsyncLLM,
    listening: socket.socket,
    args: EngineArgs,
    settings: FrontendArgs,
    template: str | None,
    recordings: Sequence[RecordingFile],
) -> int:
    app = make_app(engine, args, settings, template)
    await watch_steps(app, engine, settings, recordings)
    server = make_server(app, settings)
    logging.getLogger("uvicorn.error").addFilter(_is_not_about_tasks)
    return await _until_the_end(server, engine, listening, settings, app.state.server)


def make_app(engine: AsyncLLM, args: EngineArgs, settings: FrontendArgs, template: str | None) -> FastAPI:
    """The routes over an engine, whose metrics are counted from now on."""
    names = settings.served_model_name or [str(args.model)]
    client = engine.engine_core
    metrics = engine.stat_logger = PrometheusStatLogger(args, client.engines, names[0], client.client_index)
    for index, stats in enumerate(engine.engine_stats):
        metrics.record(stats, engine.output_processor.take_stats(index), index)
    models = OpenAIServingModels(names, str(args.model), engine.input_processor.limits.max_model_len)
    return build_app(engine, models, settings, template, metrics.registry)


def make_server(app: FastAPI, settings: FrontendArgs, protocol: Any = "auto") -> NoSignalServer:
    """A server of these routes, which `serve(sockets=...)` starts. `protocol`: uvicorn's, for HTTP/1.1."""
    return NoSignalServer(
        uvicorn.Config(
            app,
            http=protocol,
            log_level=settings.uvicorn_log_level,
            access_log=not settings.disable_uvicorn_access_log,
            timeout_graceful_shutdown=SECONDS_TO_CLOSE,
            lifespan="off",
            ws="none",
        )
    )


async def _until_the_end(
    server: NoSignalServer, engine: AsyncLLM, listening: socket.socket, settings: FrontendArgs, state: ServerState
) -> int:
    asked = signals()
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    dying, stopping = asyncio.create_task(engine.wait_until_dead()), asyncio.create_task(asked.acquire())
    await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if dying.done():
        code = 1
        logger.error("The engine has ended: %s", engine.dead_error)
        await _either(serving, asked, SECONDS_TO_TELL)
    elif stopping.done():
        state.draining = True
        logger.info("Shutting down: %d requests are open", state.num_open)
        code = await _drain(state, engine, asked, settings.shutdown_timeout)
        engine.end_requests()
        # uvicorn tells open requests that their client has left: they send their last events before.
        await _drain(state, None, asked, SECONDS_TO_CLOSE)
    server.should_exit = True
    await _either(serving, asked, 2 * SECONDS_TO_CLOSE)
    server.force_exit = True
    for task in (dying, stopping):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    return code


async def _drain(state: ServerState, engine: AsyncLLM | None, asked: asyncio.Semaphore, seconds: float) -> int:
    """Waits for open requests, at most so long, and not after a second signal. Returns the exit code.

    With an engine, it also ends when that does.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while state.num_open and asked.locked() and not (engine and engine.errored) and loop.time() < end:
        await asyncio.sleep(0.02)
    return 1 if engine and engine.errored else 0


async def _either(serving: asyncio.Task[None], asked: asyncio.Semaphore, seconds: float) -> None:
    """Waits for the server's end or a further signal, at most so long."""
    signalled = asyncio.create_task(asked.acquire())
    await asyncio.wait({serving, signalled}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()


def signals() -> asyncio.Semaphore:
    """Each signal releases it once."""
    asked = asyncio.Semaphore(0)
    for one in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(one, asked.release)
    return asked


@contextmanager
def signals_end_the_start() -> Generator[None, None, None]:
    """SIGTERM before the engine is ready ends everything, and is no failure."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    before = [signal.signal(one, leave) for one in SIGNALS]
    try:
        yield
    finally:
        for one, handler in zip(SIGNALS, before, strict=True):
            signal.signal(one, handler)


def _allow_many_connections() -> None:
    """Raises the limit of open files as far as the system allows: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
    if soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_not_about_tasks(record: logging.LogRecord) -> bool:
    """uvicorn tells of each task that it cancels at the end, with a traceback."""
    return "Exception in ASGI application" not in record.getMessage() or not isinstance(
        (record.exc_info or (None, None))[1], asyncio.CancelledError
    )
