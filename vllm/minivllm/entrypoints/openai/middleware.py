"""Handle the concerns that all requests share, before their routes: keys, body sizes, counting.

`make_server` turns off WebSockets and lifespan events, so every scope is an HTTP request.

In vLLM v0.33.0: `vllm/entrypoints/serve/middleware/`.
"""

import hashlib
import hmac
from collections.abc import Sequence
from http import HTTPStatus

from fastapi import Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minivllm.entrypoints.openai.errors import RequestError, json_response, unavailable

WITH_KEY = ("/v1", "/v2", "/inference", "/cohere", "/xray/")
MAX_BODY_BYTES = 32 * 2**20


async def json_only(request: Request) -> None:
    """Refuse a body that is not declared as JSON, such as a form that a web page submits."""
    kind = request.headers.get("content-type", "").lower().split(";")[0].strip()
    if kind != "application/json":
        raise HTTPException(400, "the Content-Type must be application/json")


JSON_ONLY = [Depends(json_only)]


class ServerState:
    """The number of open requests, and whether the server refuses new ones."""

    def __init__(self) -> None:
        self.num_open = 0
        self.draining = False


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
        if free or self._knows(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        matches = [hmac.compare_digest(_digest(key.strip()), known) for known in self._known]  # all of them, always
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class OpenRequestsMiddleware:
    """Middleware that counts generating requests, and refuses new ones while the server drains."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting it while it is open if it generates."""
        # Only requests that generate are waited for when the server shuts down.
        if scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        if self._state.draining:
            await json_response(unavailable("the server is shutting down"))(scope, receive, send)
            return
        self._state.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._state.num_open -= 1


class BodySizeMiddleware:
    """Middleware that refuses oversized bodies, before they fill the memory."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and refuse it as soon as its body grows too large."""
        announced = Headers(scope=scope).get("content-length", "0")
        # Refuse by the header if there is one, before anything is read.
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            await json_response(self._error())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            # A body sent in chunks has no length in its header.
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> RequestError:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        return RequestError(f"the body is larger than {self._max_bytes} bytes", status, "BadRequestError")
