"""Lesson 01's picture of a full card: where an L4's memory goes, and how much of its KV cache holds
a token.
"""

from __future__ import annotations

from minivllm.config.units import GIB
from minivllm.memory import MemoryLedger
from minivllm_lab.kv_cache.reservation import unused_shares
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, line, rect, svg, swatch, text, tint
from minivllm_lab.pictures.palette import BLUE, GREY, ORANGE, PALE
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger

WIDTH, LEFT, WIDE = 700, 20, 660
RESERVED = 2048
MODEL, GPU, KIND = "Llama-3.1-8B", "L4", "alpaca"
BAR_Y, CACHE_Y, TALL = 62, 150, 46


def bet() -> str:
    """Draw the card as a scheduler of 2023 sees it: full."""
    ledger = _ledger()
    running = ledger.longest_request // RESERVED
    return _picture(
        ledger,
        f"An {GPU} that is full: {running} requests, and the next one must wait",
        [1.0] * running,
        f"Its KV cache: {running} requests with {RESERVED:,} slots each, a slot for each token that may come",
        [("reserved", tint(ORANGE, 0.55))],
    )


def reveal() -> str:
    """Draw the slots that ever hold a token."""
    ledger = _ledger()
    running = ledger.longest_request // RESERVED
    share = 1 - unused_shares([RESERVED])[KIND]["unused"][str(RESERVED)]
    fitting = int(ledger.tokens / (share * RESERVED))
    return _picture(
        ledger,
        f"The same card: {running * share * RESERVED / ledger.tokens:.0%} of the cache ever holds a token",
        [share] * running,
        f"A request has {share * RESERVED:.0f} tokens on average. Without reservations {fitting} requests fit.",
        [("holds a token", BLUE), ("reserved, and never written", tint(ORANGE, 0.55))],
    )


def _ledger() -> MemoryLedger:
    return memory_ledger(known_model(MODEL), GPU, max_model_len=RESERVED)


def _picture(ledger: MemoryLedger, title: str, filled: list[float], below: str, legend: list[tuple[str, str]]) -> str:
    """Draw the card's memory, and its cache enlarged: a region a request, `filled` to a share."""
    parts = [text(LEFT, 30, title, size=16, bold=True)]
    left, right = LEFT, LEFT
    x = float(LEFT)
    for name, size, colour in _shares(ledger):
        width = WIDE * size / ledger.device.memory_bytes
        parts.append(rect(x, BAR_Y, width, 34, colour, stroke="#FFFFFF", label=name, size=11))
        if colour == ORANGE:
            left, right = x, x + width
        x += width
    parts.append(text(LEFT, BAR_Y - 8, f"all of the card, {ledger.device.memory_bytes / GIB:.1f} GiB", colour=QUIET))
    parts += [
        line((left, BAR_Y + 36), (LEFT, CACHE_Y - 4), ORANGE, dash="4 3"),
        line((right, BAR_Y + 36), (LEFT + WIDE, CACHE_Y - 4), ORANGE, dash="4 3"),
    ]
    region = WIDE * RESERVED / ledger.tokens
    for index, share in enumerate(filled):
        x = LEFT + index * region
        parts.append(rect(x, CACHE_Y, region - 3, TALL, legend[-1][1]))
        if share < 1:
            parts.append(rect(x, CACHE_Y, max(2.0, (region - 3) * share), TALL, BLUE))
    end = LEFT + len(filled) * region
    parts.append(rect(end, CACHE_Y, LEFT + WIDE - end, TALL, BLANK, stroke=QUIET, dash="3 2"))
    parts.append(text(LEFT, CACHE_Y + TALL + 22, below))
    y = CACHE_Y + TALL + 40
    x = float(LEFT)
    for words, colour in [*legend, ("too short for a request", BLANK)]:
        parts.append(swatch(x, y, colour, words, stroke=BORDER))
        x += 64 + 7 * len(words)
    return svg(WIDTH, y + 30, *parts, label=f"{title}. {below}")


def _shares(ledger: MemoryLedger) -> list[tuple[str, int, str]]:
    """Return the card's parts: name, bytes, colour. What a step needs beside weights is one part."""
    sizes = {row.name: row.bytes for row in ledger.rows}
    weights, cache = sizes["weights and rotary table"], ledger.kv_bytes
    unused = sizes["not ours to use"]
    working = ledger.device.memory_bytes - weights - cache - unused
    return [
        (f"the model's weights, {weights / GIB:.1f} GiB", weights, GREY),
        ("for steps", working, PALE),
        (f"cache, {cache / GIB:.1f} GiB", cache, ORANGE),
        ("left out", unused, PALE),
    ]
