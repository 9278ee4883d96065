"""As much HTTP as a lesson's server needs: one request on a connection, and its answer as server-sent events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
"""The beginning of every answer. The end of the connection is the end of the answer."""


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The request's body as an object; an empty one if there is no body, as in a GET.

    Raises:
        asyncio.IncompleteReadError: the client left before its request was complete.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
    size = int(fields.get("content-length", "0"))
    return json.loads(await reader.readexactly(size)) if size else {}


def event(text: str) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps({'text': text})}\n\n".encode()
