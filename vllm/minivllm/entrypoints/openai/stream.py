"""Send replies piece by piece, and handle clients that leave early.

In vLLM v0.33.0: `with_cancellation` in `vllm/entrypoints/serve/utils/api_utils.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from minivllm.config import NO_PARTS, Parts

Result = TypeVar("Result")
Work = Coroutine[Any, Any, Result]
CLIENT_CLOSED_REQUEST = 499
"""The status of a reply that nobody waits for, as it stands in logs; nginx's number."""


def as_json(value: Any) -> bytes:
    """Return a value as JSON; NaN and infinity, which JSON does not have, become null."""
    return to_json(value, inf_nan_mode="null")


def as_event(value: Any) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: %b\n\n" % as_json(value)


class EventStream(StreamingResponse):
    """Server-sent events. `close` is called at the end, or as soon as the client has left,
    whichever comes first.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None], parts: Parts = NO_PARTS) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events, self._close, self._parts = events, close, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        until = self._parts.until_disconnected or until_disconnected
        try:
            await until(self.stream_response(send), disconnected(receive))
        finally:
            self._close()
            # Ends the generator where it waits, so that its own `finally` runs now.
            await self._events.aclose()


async def with_cancellation(work: Work[Result], request: Request, parts: Parts = NO_PARTS) -> Result | Response:
    """Return the result of the work; if the client leaves first, cancel the work and return an
    empty reply.
    """
    result = await (parts.until_disconnected or until_disconnected)(work, disconnected(request.receive))
    return Response(status_code=CLIENT_CLOSED_REQUEST) if result is None else result


async def until_disconnected(work: Work[Result], disconnected: Work[None]) -> Result | None:
    """Return the result of the work; if the client leaves first, cancel the work and return None.

    Neither coroutine is still running when this returns, however it ends.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        # If both are done, the work is not thrown away.
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        # Cancelling is only a request: wait until both have ended.
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left; call it only after the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
