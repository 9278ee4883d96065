"""Count the events that a client gets for one answer if it reads rarely, with a collector between
it and the engine.

The collector is a few lines that merge outputs, or the reader's class of exercise 06, in an event
loop with a virtual clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm_lab.checks.virtual_loop import run_virtual

PAUSES = (0.01, 0.1, 1.0)
"""Seconds between two reads."""
Collector = Callable[[], Any]


@dataclass(frozen=True)
class Read:
    """The events and tokens that a client got if it pauses this long after each event."""

    pause: float
    events: int
    tokens: int


def read_answer(tokens: int, gap: float, pause: float, collector: Collector | None = None) -> Read:
    """Return what a client reads of an answer that gets a token every `gap` seconds, if the client
    pauses after each event.

    Raises:
        MinivllmError: The reader's collector fails, waits forever, or returns something other than
            an output.
    """
    if collector is None:
        return Read(pause, _events(tokens, gap, pause), tokens)
    try:
        return run_virtual(lambda: _read(collector, tokens, gap, pause), "your output_collector")
    except AssertionError as error:
        raise MinivllmError(str(error)) from None


def _events(tokens: int, gap: float, pause: float) -> int:
    """Count the events of a merging collector: each read takes all tokens so far, or waits for the
    next token.
    """
    read = 0
    now = 0.0
    events = 0
    while read < tokens:
        now = max(now, (read + 1) * gap)
        read = min(tokens, int(now / gap + 1e-9))
        now += pause
        events += 1
    return events


async def _read(collector: Collector, tokens: int, gap: float, pause: float) -> Read:
    buffer = collector()
    events = 0
    seen = 0

    async def put_all() -> None:
        for index in range(tokens):
            await asyncio.sleep(gap)
            buffer.put(_output(index, index == tokens - 1))

    putting = asyncio.ensure_future(put_all())
    while True:
        output = await buffer.get()
        events += 1
        try:
            seen += sum(len(completion.token_ids) for completion in output.outputs)
            finished = output.finished
        except (AttributeError, TypeError) as error:
            raise AssertionError(f"your output_collector returns {output!r}, which is not an output: {error}") from None
        if finished or events > 2 * tokens:
            await putting
            return Read(pause, events, seen)
        await asyncio.sleep(pause)


def _output(token_id: int, last: bool) -> RequestOutput:
    completion = CompletionOutput(0, f" {token_id}", [token_id], finish_reason="length" if last else None)
    return RequestOutput("answer", None, [], None, [completion], last)
