"""Run `minivllm proxy`: the proxy's routes and its process."""

import socket

import uvloop
from fastapi import FastAPI, Request
from starlette.responses import Response

from minivllm.entrypoints.openai.errors import EXCEPTION_HANDLERS
from minivllm.entrypoints.openai.http_server import bind, until_the_end
from minivllm.entrypoints.openai.middleware import JSON_ONLY, BoundedRoute, OpenRequestsMiddleware
from minivllm.entrypoints.openai.stream import with_cancellation
from minivllm.entrypoints.proxy.proxy import Proxy, headers_for_servers
from minivllm.entrypoints.proxy.settings import ProxyArgs


def serve(settings: ProxyArgs) -> int:
    """Serve until a signal arrives; return the exit code.

    Raises:
        MinivllmError: the port is in use.
    """
    with bind(settings) as listening:
        return uvloop.run(_serve(listening, settings))


async def _serve(listening: socket.socket, settings: ProxyArgs) -> int:
    proxy = Proxy(settings)
    await proxy.start()
    try:
        return await until_the_end(build_app(proxy), proxy, listening, settings)
    finally:
        await proxy.close()


def build_app(proxy: Proxy) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="minivllm proxy", exception_handlers=EXCEPTION_HANDLERS)
    app.router.route_class = BoundedRoute
    app.state.server = proxy.state
    app.add_middleware(OpenRequestsMiddleware)

    @app.post("/v1/completions", dependencies=JSON_ONLY)
    @app.post("/v1/chat/completions", dependencies=JSON_ONLY)
    async def create(request: Request) -> Response:
        content = await request.body()
        return await with_cancellation(proxy.answer(request.url.path, content, request.headers), request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await proxy.ask("decode", "/v1/models", None, headers_for_servers(request.headers))

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if proxy.is_healthy else 503)

    return app
