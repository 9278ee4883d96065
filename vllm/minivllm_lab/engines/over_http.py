"""A real server with a learner's parts, and clients of all kinds: patient ones, one that reads
late, some that disconnect.

Server and clients share one event loop in one process, on real sockets; the engine core runs in a
thread of the same process. So the server starts quickly, and it can use a learner's parts of the
core, which are Python objects.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.async_thread_client import AsyncThreadClient
from minivllm.entrypoints.openai.api_server import make_app
from minivllm.entrypoints.openai.http_server import bind, make_server
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.errors import MinivllmError
from minivllm_lab.engines.http_load import post

SECONDS = 120.0
"""How long a whole load may take on the clock."""
TRIES = 3
"""How often a load is served if a client has left too late: a busy machine may end its answer
before it is gone.
"""
SMALL_BUFFER = 1024
"""Bytes that sockets keep for a reader who is slow: then the server, not the system, holds what
was not read.
"""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client: what it requests, and how it behaves.

    - `leaves_after`: it closes its connection after this many events; an answer that is not a stream
      is never waited for.
    - `reads_late`: it reads nothing before the engine has nothing left to do.
    - `model`: the adapter that it requests; None: the model itself.
    """

    prompt: str
    model: str | None = None
    max_tokens: int = 24
    stop: tuple[str, ...] = ()
    stream: bool = True
    leaves_after: int | None = None
    reads_late: bool = False

    def body(self) -> dict[str, Any]:
        """Return the body that the client posts to /v1/completions."""
        asked = {"prompt": self.prompt, "max_tokens": self.max_tokens, "stop": list(self.stop), "temperature": 0}
        asked |= {"model": self.model} if self.model else {}
        return {**asked, "stream": self.stream, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Answer:
    """An answer as a client received it: the text, its tokens, and the number of events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_events: int = 0
    finish_reason: str | None = None


@dataclass
class Load:
    """The answers in the order of the clients, and the server's metrics afterwards."""

    answers: list[Answer]
    num_aborted: int
    num_free_blocks: int
    num_blocks: int


def serve_load(clients: Sequence[Client], parts: Parts, lora_modules: Sequence[str] = (), **engine_args: Any) -> Load:
    """Serve these clients, all at once, on the embedded model, with these adapters (name=path).

    If fewer requests were aborted than clients disconnected, all are served again, at most `TRIES`
    times in total.

    Raises:
        MinivllmError: an answer was an error, or never arrived.
    """
    leaving = sum(client.leaves_after is not None for client in clients)
    for _ in range(TRIES):
        load = _load_once(clients, parts, lora_modules, engine_args)
        if load.num_aborted >= leaving:
            break
    return load


def _load_once(
    clients: Sequence[Client], parts: Parts, lora_modules: Sequence[str], engine_args: dict[str, Any]
) -> Load:
    """Serve the load once, in a thread with an event loop of its own."""
    done: Future[Load] = Future()

    def run() -> None:
        try:
            load = asyncio.wait_for(_serve_load(clients, parts, lora_modules, engine_args), SECONDS)
            done.set_result(asyncio.run(load))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # JupyterLab has a loop in the main one
    try:
        return done.result(1.5 * SECONDS)
    except TimeoutError:
        waiting = f"after {SECONDS:g} s not all clients had their answers: does a part wait for ever?"
        raise MinivllmError(waiting) from None


async def _serve_load(
    clients: Sequence[Client], parts: Parts, lora_modules: Sequence[str], engine_args: dict[str, Any]
) -> Load:
    settings = {"model": EMBEDDED_MODEL, "device": "cpu", "dtype": "float32", "max_model_len": 256}
    args = EngineArgs(**{**settings, "num_gpu_blocks_override": 201, **engine_args, "parts": parts})
    core = AsyncThreadClient(args)
    engine = AsyncLLM(args, core)
    try:
        pool = core.engine_core.scheduler.kv_cache_manager.block_pool
        async with serving(engine, args, lora_modules, SMALL_BUFFER) as (port, _):
            await _answer_of(Client(prompt="x = 1", max_tokens=2), port, engine)
            answers = await asyncio.gather(*(_answer_of(client, port, engine) for client in clients))
            await _idle(engine)
        aborted = engine.stat_logger.registry.get_sample_value(  # type: ignore[union-attr]
            "vllm:request_success_total", {"model_name": "tiny", "engine": "0", "finished_reason": "abort"}
        )
        return Load(list(answers), int(aborted or 0), pool.get_num_free_blocks(), pool.num_usable_blocks)
    finally:
        await asyncio.to_thread(engine.shutdown)


@asynccontextmanager
async def serving(
    engine: AsyncLLM, args: EngineArgs, lora_modules: Sequence[str] = (), buffer: int | None = None
) -> AsyncIterator[tuple[int, Any]]:
    """Run the server of `minivllm serve` in this event loop; yield its port and its application.

    With `buffer`, a connection keeps only that many bytes for a slow reader, and the server none.
    """
    settings = FrontendArgs(
        host="127.0.0.1", port=0, served_model_name=["tiny"], disable_uvicorn_access_log=True,
        uvicorn_log_level="error", lora_modules=list(lora_modules),
    )  # fmt: skip
    listening = bind(settings)
    if buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    app = await make_app(engine, settings, None)
    server = make_server(app, settings, "auto" if buffer is None else _unbuffered())
    running = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1], app
    finally:
        server.should_exit = True
        await running
        listening.close()


def _unbuffered() -> type:
    """Return a protocol whose connections buffer nothing for a slow reader."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Unbuffered(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            transport.set_write_buffer_limits(high=0)
            super().connection_made(transport)

    return Unbuffered


async def _idle(engine: AsyncLLM, seconds: float = 20.0) -> None:
    """Wait until the core has nothing to do, for at most `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end and (engine.has_unfinished_requests() or engine.stats.num_running_reqs):
        await asyncio.sleep(0.01)


async def _answer_of(client: Client, port: int, engine: AsyncLLM) -> Answer:
    """Send a client's request and return the answer that it receives.

    Raises:
        MinivllmError: the answer is an error, or incomplete.
    """
    connection, loop = socket.socket(), asyncio.get_running_loop()
    if client.reads_late:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.setblocking(False)
    with connection:
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, post("/v1/completions", client.body()))
        if client.reads_late:
            await asyncio.sleep(0.05)
            await _idle(engine)
        received = b""
        while client.leaves_after is None or received.count(b"data: ") < client.leaves_after:
            if client.leaves_after is not None and not client.stream:
                await asyncio.sleep(0.05)
                break
            if not (piece := await loop.sock_recv(connection, 65536)):
                break
            received += piece
    return Answer() if client.leaves_after is not None else _read(client, received)


def _read(client: Client, received: bytes) -> Answer:
    """Return the answer in the bytes that a client received."""
    lines = received.decode().splitlines()
    status = lines[0].split()[1] if lines else "none"
    events = [line.removeprefix("data: ") for line in lines if line.startswith(("data: ", "{"))]
    if status != "200" or not events:
        raise MinivllmError(f"the server answered with status {status}: {' '.join(events)[:300]}")
    if client.stream and events.pop() != "[DONE]":
        raise MinivllmError("a stream broke off: it does not end with [DONE]")
    answer = Answer()
    for event in map(json.loads, events):
        if "error" in event:
            raise MinivllmError(f"the server answered with an error: {event['error']['message']}")
        (choice,) = event["choices"]
        answer.num_events += 1
        answer.text += choice["text"]
        answer.token_ids += choice["token_ids"] or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    return answer
