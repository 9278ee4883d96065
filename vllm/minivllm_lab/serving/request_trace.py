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
from minivllm.entrypoints.openai import answer
from minivllm.entrypoints.openai.middleware import HttpMetricsMiddleware

STEP_BEGINS, OUTPUTS_ARE_BACK = "a step of the core begins", "the step's outputs are back"
HOPS = {
    "uvicorn has read the request": (HttpMetricsMiddleware, "__call__"),
    "its JSON is checked": (answer.Answer, "create"),
    "the prompt is tokenized": (AsyncLLM, "add_request"),
    "it goes to the core": (AsyncMPClient, "add_request"),
    STEP_BEGINS: (OutputProcessor, "note_scheduled"),
    OUTPUTS_ARE_BACK: (OutputProcessor, "note_scheduled"),
    "the text is in its collector": (RequestOutputCollector, "put"),
    "the first event goes out": (answer, "as_event"),
}
"""The hops between the client's sending and its first event, in order, and the function of each."""


@contextmanager
def trace() -> Iterator[dict[str, float]]:
    """Yield the `time.monotonic()` at which the first request passes each of HOPS, in their order."""
    times: dict[str, float] = {}
    note_scheduled = OutputProcessor.note_scheduled

    def noting(original: Callable[..., Any], hop: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            times.setdefault(hop, time.monotonic())
            return original(*arguments, **more)

        return wrapped

    def take_outputs(processor: OutputProcessor, admitted: Sequence[str], timestamp: float) -> None:
        if admitted:
            times.setdefault(STEP_BEGINS, timestamp)
            times.setdefault(OUTPUTS_ARE_BACK, time.monotonic())
        note_scheduled(processor, admitted, timestamp)

    with ExitStack() as stack:
        for hop, (owner, name) in HOPS.items():
            note = take_outputs if owner is OutputProcessor else noting(getattr(owner, name), hop)
            stack.enter_context(mock.patch.object(owner, name, note))
        yield times
