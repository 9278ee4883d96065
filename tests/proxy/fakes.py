"""Servers that only record what they are sent, and a proxy in front of them, all in one event
loop on real sockets.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from patience import PATIENCE
from server.serving import free_port

from minivllm.entrypoints.openai.http_server import bind, make_server
from minivllm.entrypoints.proxy.proxy import Proxy, Upstream
from minivllm.entrypoints.proxy.serve import build_app
from minivllm.entrypoints.proxy.settings import ProxyArgs

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3, 4]], "remote_engine_id": "P",
    "remote_request_id": "cmpl-req-1-0-ac5fa5b5", "remote_host": "127.0.0.1", "remote_port": 5601, "tp_size": 1,
}  # fmt: skip
WHOLE = json.dumps({"id": "cmpl-1", "choices": [{"text": " ünd\u2028"}], "usage": {}}, ensure_ascii=False).encode()
EVENTS = [b'data: {"choices": [{"text": "a"}]}\n\n', b'data: {"choi', b'ces": []}\n\ndata: [DONE]\n\n']
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Got:
    """A request that a server has received, with its headers by lower-case name."""

    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.content)


def json_reply(body: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


async def whole(request: web.Request) -> web.StreamResponse:
    return web.Response(body=WHOLE, content_type="application/json", headers={"X-Request-Id": "from D"})


async def stream(request: web.Request, events: Sequence[bytes] = EVENTS) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await reply.prepare(request)
    for event in events:
        await reply.write(event)
        await asyncio.sleep(0.02)
    return reply


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Send two pieces of a stream and hang up in the middle of an event."""
    reply = await stream(request, EVENTS[:2])
    request.transport.abort()
    return reply


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def begins(request: web.Request) -> web.StreamResponse:
    """Send one event and then nothing more."""
    await stream(request, EVENTS[:1])
    return await never(request)


async def dies(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def completes(request: web.Request) -> web.StreamResponse:
    """Answer like a decode server."""
    return await (stream if (await request.json()).get("stream") else whole)(request)


prefills = json_reply({"choices": [{"text": "!", "finish_reason": "length"}], "kv_transfer_params": PARAMS})


@dataclass
class Fake:
    """A server that answers as told, and records which clients have left."""

    answer: Answer
    got: list[Got] = field(default_factory=list)
    num_left: int = 0
    health: int = 200
    health_delay: float = 0.0
    runs: bool = True
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append(Got(request.path, headers, await request.read()))
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def say_health(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(self.health_delay)
        return web.Response(status=self.health)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        app.router.add_get("/health", self.say_health)
        app.router.add_get("/v1/models", json_reply({"data": [{"id": self.url}]}))
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner


@dataclass
class Setting:
    """A proxy, its servers, and a client."""

    proxy: Proxy
    prefill: list[Fake]
    decode: list[Fake]
    client: aiohttp.ClientSession
    url: str

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, bytes]:
        async with self.client.post(self.url + path, json=body, headers=headers) as reply:
            return reply.status, await reply.read()

    def upstream(self, server: "Fake") -> Upstream:
        """Return the proxy's own object for this server."""
        return next(known for known in self.proxy.servers if known.url == server.url)


@asynccontextmanager
async def setting(prefill=None, decode=None, **settings: Any) -> AsyncIterator[Setting]:
    """Start a proxy in front of these servers."""
    prefill, decode = prefill or [Fake(prefills)], decode or [Fake(completes)]
    settings = {"health_interval": 60.0, **settings}
    urls = [[server.url for server in servers] for servers in (prefill, decode)]
    args = ProxyArgs(prefill=urls[0], decode=urls[1], port=0, **settings)
    async with AsyncExitStack() as stack:
        for item in (*prefill, *decode):
            if item.runs:
                stack.push_async_callback((await item.start()).cleanup)
        proxy = Proxy(args)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        listening = bind(args)
        server = make_server(build_app(proxy), args)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            yield Setting(proxy, prefill, decode, client, url)
        finally:
            await client.close()
            server.should_exit = server.force_exit = True
            await serving


async def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def proxied(servers: Callable[..., dict[str, Any]] = lambda **_: {}) -> Callable[[Callable[..., Any]], Any]:
    """Run a test in a loop as `test(there, ...)`, with the servers that `servers(...)` describes;
    both get the test's arguments.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def run(arguments: dict[str, Any]) -> None:
            async with setting(**servers(**arguments)) as cluster, asyncio.timeout(20):
                await test(cluster, **arguments)

        def in_a_loop(**arguments: Any) -> None:
            with ThreadPoolExecutor(1) as thread:  # a browser's test may have left its event loop in this one
                thread.submit(asyncio.run, run(arguments)).result()

        in_a_loop.__name__, in_a_loop.__doc__ = test.__name__, test.__doc__
        parameters = list(inspect.signature(test).parameters.values())[1:]
        in_a_loop.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return in_a_loop

    return decorate
