"""Trace one request through the server: the time at each hop, on the clock that a machine's
processes share.

    with trace() as hops:
        ...                     # one request, from a client in another process
    hops                        # {"uvicorn has read the request": 12.0013, ...}

While the block runs, the functions at each hop record the time before they do their work, since the
receiver of what they hand over may be quicker than they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from minivllm.engine.async_llm import AsyncLLM, RequestOutputCollector
from minivllm.engine.async_mp_client import AsyncMPClient
from minivllm.engine.output_processor import OutputProcessor
from minivllm.entrypoints.openai.middleware import BodySizeMiddleware
from minivllm.entrypoints.openai.serving_engine import OpenAIServing

HOPS = (
    "uvicorn has read the request",
    "its JSON is checked",
    "the prompt is tokenized",
    "it goes to the core",
    "a step of the core begins",
    "the step's outputs are back",
    "the text is in its collector",
    "the first event goes out",
)
"""In their order, between the client's sending and its first event."""
NOTED_BEFORE = (
    (OpenAIServing, "create", HOPS[1]),
    (AsyncLLM, "add_request", HOPS[2]),
    (AsyncMPClient, "add_request", HOPS[3]),
    (RequestOutputCollector, "put", HOPS[6]),
)


@contextmanager
def trace() -> Iterator[dict[str, float]]:
    """Yield the `time.monotonic()` at which the first request passes each of HOPS, in their order."""
    times: dict[str, float] = {}

    def note(hop: str, at: float | None = None) -> None:
        times.setdefault(hop, time.monotonic() if at is None else at)

    def noting(original: Callable[..., Any], hop: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            note(hop)
            return original(*arguments, **more)

        return wrapped

    in_middleware, note_scheduled = BodySizeMiddleware.__call__, OutputProcessor.note_scheduled

    async def call_application(middleware: Any, scope: Any, receive: Any, send: Any) -> None:
        note(HOPS[0])

        async def noting_send(message: Any) -> None:
            if message.get("body"):
                note(HOPS[7])
            await send(message)

        await in_middleware(middleware, scope, receive, noting_send)

    def take_outputs(processor: OutputProcessor, admitted: Sequence[str], timestamp: float) -> None:
        if admitted:
            note(HOPS[4], timestamp)
            note(HOPS[5])
        note_scheduled(processor, admitted, timestamp)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(BodySizeMiddleware, "__call__", call_application))
        stack.enter_context(mock.patch.object(OutputProcessor, "note_scheduled", take_outputs))
        for owner, name, hop in NOTED_BEFORE:
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name), hop)))
        yield times
