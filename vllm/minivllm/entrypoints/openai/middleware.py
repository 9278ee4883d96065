"""Handle the concerns that all requests share, before their routes: keys, body sizes, counting.

`make_server` turns off WebSockets and lifespan events, so every scope is an HTTP request.

In vLLM v0.33.0: `vllm/entrypoints/serve/middleware/`.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.entrypoints.openai.errors import RequestError, json_response

WITH_KEY = ("/v1", "/v2", "/inference", "/cohere", "/xray/")
NOT_COUNTED = {"/metrics", "/health", "/load", "/ping", "/version"}
MAX_BODY_BYTES = 32 * 2**20
MAX_VALUES, MAX_KEYS = 2**18, 2**15
"""Most values, and most keys, in a body: parsing holds up all other clients."""
BYTES_AT_ONCE = 2**18


async def json_only(request: Request) -> None:
    """Refuse a body that is not declared as JSON, such as a form that a web page submits."""
    kind = request.headers.get("content-type", "").lower().split(";")[0].strip()
    if kind != "application/json":
        raise HTTPException(400, "the Content-Type must be application/json")


JSON_ONLY = [Depends(json_only)]


class BoundedRequest(Request):
    """A request whose body is read only if it fits in memory, and parsed only if that is quick."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's pieces.

        Raises:
            RequestError: it is, or announces to be, too large.
        """
        error = _too_large(f"the body is larger than {MAX_BODY_BYTES} bytes")
        num_bytes = 0
        # A body sent in chunks has no length in its header.
        if int(self.headers.get("content-length", "0")[:20]) > MAX_BODY_BYTES:
            raise error
        async for piece in super().stream():
            num_bytes += len(piece)
            if num_bytes > MAX_BODY_BYTES:
                raise error
            yield piece

    async def json(self) -> Any:
        """Return the body's value.

        Raises:
            RequestError: it has too many values or keys.
        """
        await _check_size(await self.body())
        value = await super().json()
        await asyncio.sleep(0)
        return value


class BoundedRoute(APIRoute):
    """A route whose requests are `BoundedRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(BoundedRequest(request.scope, request.receive))

        return bounded


async def _check_size(body: bytes) -> None:
    """Refuse a body with too many values or keys, which are counted outside of strings."""
    num_values = num_keys = start = 0
    in_string = False
    if len(body) > BYTES_AT_ONCE and not json.detect_encoding(body).startswith("utf-8"):
        raise _too_large(f"a body of over {BYTES_AT_ONCE:,} bytes must be UTF-8")
    while len(body) > BYTES_AT_ONCE and start < len(body):
        piece = body[start : start + BYTES_AT_ONCE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # an escape stays in one piece
            piece = body[start : start + BYTES_AT_ONCE + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b" ".join(parts[in_string::2])
        in_string = in_string == (len(parts) % 2 == 1)
        num_values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        num_keys += outside.count(b":")
        if num_values > MAX_VALUES or num_keys > MAX_KEYS:
            raise _too_large(f"the body has over {MAX_VALUES:,} values or {MAX_KEYS:,} keys; send several requests")
        await asyncio.sleep(0)


def _too_large(message: str) -> RequestError:
    return RequestError(message, 413, "BadRequestError")


class ServerState:
    """The number of open requests, and whether the server refuses new ones."""

    num_open = 0
    draining = False


class AuthenticationMiddleware:
    """Middleware that requires one of the keys for requests below certain paths. Keys are compared
    as hashes, each in constant time.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        # Hashes have one length, so the time of a comparison tells nothing about a key's length.
        self._known = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or answer 401."""
        # Browsers ask with OPTIONS before they send a key (CORS).
        free = scope["method"] == "OPTIONS" or not scope["path"].startswith(WITH_KEY)
        passes = free or self._knows(Headers(scope=scope).get("authorization", ""))
        answers = self._app if passes else JSONResponse({"error": "Unauthorized"}, 401)
        await answers(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        matches = [hmac.compare_digest(_digest(key.strip()), known) for known in self._known]  # all of them, always
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class OpenRequestsMiddleware:
    """Middleware that counts generating requests, and refuses new ones while the server drains."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting it while it is open if it generates."""
        state: ServerState = scope["app"].state.server
        # Only requests that generate are waited for when the server shuts down.
        generates = scope["method"] == "POST" and scope["path"].startswith("/v1/")
        if generates and state.draining:
            await json_response(RequestError("the server is shutting down", 503))(scope, receive, send)
            return
        state.num_open += generates
        try:
            await self._app(scope, receive, send)
        finally:
            state.num_open -= generates


class HttpMetricsMiddleware:
    """Middleware that counts and times requests, under the names of prometheus-fastapi-instrumentator,
    which vLLM uses.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        labels = ("method", "handler")
        self._requests = Counter("http_requests", "Requests.", (*labels, "status"), registry=registry)
        name, text = "http_request_duration_seconds", "Seconds until a request's answer has ended."
        self._seconds = Histogram(name, text, labels, buckets=(0.1, 0.5, 1), registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record how it ended."""
        start = time.monotonic()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            handler = getattr(scope.get("route"), "path", "none")  # a path of the client's own could be anything
            if handler not in NOT_COUNTED:
                self._requests.labels(scope["method"], handler, f"{status // 100}xx").inc()
                self._seconds.labels(scope["method"], handler).observe(time.monotonic() - start)
