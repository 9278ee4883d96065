"""A client that reads seldom: how many events it gets of one answer, with a collector between it and the engine.

The collector is one that merges, in a few lines; or the reader's own from exercise 06, in an event loop whose clock is
virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm_lab.virtual_loop import run_virtual

PAUSES = (0.01, 0.1, 1.0)
"""Seconds between two reads."""
Collector = Callable[[], Any]


@dataclass(frozen=True)
class Read:
    """What a client got that pauses so long after each event."""

    pause: float
    events: int
    tokens: int


def read_answer(tokens: int, gap: float, pause: float, collector: Collector | None = None) -> Read:
    """An answer of so many tokens, `gap` seconds apart, as a client gets it that pauses after each event.

    Raises:
        MinivllmError: the reader's collector broke, waits for ever, or gives something else than an output.
    """
    if collector is None:
        return Read(pause, _events(tokens, gap, pause), tokens)
    try:
        return run_virtual(lambda: _read(collector, tokens, gap, pause), "your output_collector")
    except AssertionError as error:
        raise MinivllmError(str(error)) from None


def _events(tokens: int, gap: float, pause: float) -> int:
    """Events of a collector that merges: each read takes all there is, or waits for the next token."""
    read, now, events = 0, 0.0, 0
    while read < tokens:
        now = max(now, (read + 1) * gap)
        read = min(tokens, int(now / gap + 1e-9))
        now, events = now + pause, events + 1
    return events


async def _read(collector: Collector, tokens: int, gap: float, pause: float) -> Read:
    between, events, seen = collector(), 0, 0

    async def put_all() -> None:
        for index in range(tokens):
            await asyncio.sleep(gap)
            between.put(_output(index, index == tokens - 1))

    putting = asyncio.ensure_future(put_all())
    while True:
        output = await between.get()
        events += 1
        try:
            seen += sum(len(one.token_ids) for one in output.outputs)
            finished = output.finished
        except (AttributeError, TypeError) as error:
            raise AssertionError(f"your output_collector gives {output!r}, which is no output: {error}") from None
        if finished or events > 2 * tokens:
            await putting
            return Read(pause, events, seen)
        await asyncio.sleep(pause)


def _output(token_id: int, last: bool) -> RequestOutput:
    completion = CompletionOutput(0, f" {token_id}", [token_id], finish_reason="length" if last else None)
    return RequestOutput("answer", None, [], None, [completion], last)
