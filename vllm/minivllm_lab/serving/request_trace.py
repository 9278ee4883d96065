"""One request on its way through the server: the time at each hop, on the one clock that a machine's processes share.

    with Trace() as trace:
        ...                     # one request, from a client in another process
    trace.hops()                # [("the application has the request", 12.0013), ...]

The functions that the hops go through are replaced while the block runs, by ones that note the time and call them. A
hop that hands something over is noted before it does: whoever gets it may be quicker than the one who gave it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

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


class Trace:
    """Notes when a request first passes each of `HOPS`. For one request at a time."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._replaced: list[tuple[type, str, Callable[..., Any] | None]] = []

    def hops(self) -> list[tuple[str, float]]:
        """(hop, seconds of `time.monotonic()`) of those that were passed."""
        return [(hop, self._times[hop]) for hop in HOPS if hop in self._times]

    def __enter__(self) -> Self:
        self._replace(BodySizeMiddleware, "__call__", self._at_the_application)
        self._replace(OpenAIServing, "create", self._before(HOPS[1]))
        self._replace(AsyncLLM, "add_request", self._before(HOPS[2]))
        self._replace(AsyncMPClient, "add_request", self._before(HOPS[3]))
        self._replace(OutputProcessor, "note_scheduled", self._at_the_outputs)
        self._replace(RequestOutputCollector, "put", self._before(HOPS[6]))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, own in self._replaced:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

    def _replace(self, owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))  # None: it is inherited
        setattr(owner, name, wrap(getattr(owner, name)))

    def _note(self, hop: str, at: float | None = None) -> None:
        self._times.setdefault(hop, time.monotonic() if at is None else at)

    def _before(self, hop: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*arguments: Any, **more: Any) -> Any:
                self._note(hop)
                return original(*arguments, **more)

            return noted

        return wrap

    def _at_the_application(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(middleware: Any, scope: Any, receive: Any, send: Any) -> None:
            self._note(HOPS[0])

            async def sent(message: Any) -> None:
                if message.get("body"):
                    self._note(HOPS[7])
                await send(message)

            await original(middleware, scope, receive, sent)

        return noted

    def _at_the_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(processor: OutputProcessor, admitted: Sequence[str], timestamp: float) -> None:
            if admitted:
                self._note(HOPS[4], timestamp)
                self._note(HOPS[5])
            original(processor, admitted, timestamp)

        return noted
