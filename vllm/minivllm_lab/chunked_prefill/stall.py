"""Lesson 10's pictures of steps as bars: a prompt among chats, whole or in pieces, and how busy a
step keeps arithmetic and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm_lab.pictures.drawing import BLANK, QUIET, legend, line, rect, svg, text
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, PURPLE
from minivllm_simulate.hardware import get_hardware

WIDTH, TOP, BAR = 700, 62, 30
CHATS, PROMPT = 4, 1800
LEFT, RIGHT = 132, 30
Pieces = Sequence[int]
"""The prompt's tokens in each step; None as a whole: not known yet."""


def pieces(budget: int) -> list[int]:
    """Return the prompt's tokens in each of its mixed steps, beside a token of each chat."""
    chunk = budget - CHATS
    return [min(chunk, PROMPT - done) for done in range(0, PROMPT, chunk)]


def bet() -> str:
    """Draw the prompt in a step of its own, and the row that the bet is about, still empty."""
    rows = [("prefill first", [PROMPT], 0), ("mixed, 2,048", None, CHATS)]
    return _stalls("How long do the chats wait?", rows)


def reveal() -> str:
    """Draw the same prompt prefill first, mixed in one step, and mixed in four."""
    rows = [("prefill first", [PROMPT], 0), ("mixed, 2,048", pieces(2048), CHATS), ("mixed, 512", pieces(512), CHATS)]
    return _stalls("Only the budget bounds the wait", rows, "the chats get their tokens where a step ends")


def meters() -> str:
    """Draw three steps on an H100, each with the share of its time in which arithmetic and memory
    are busy.
    """
    gpu = get_hardware("H100")
    knee = round(gpu.flops_of("bfloat16") / gpu.bandwidth)
    steps = [
        ("16 chats decode", 16),
        ("2,048 tokens of a prompt", 2048),
        (f"16 chats and {knee - 16} of a prompt", knee),
    ]
    left, wide, top, gap = 232, 240, 64, 74
    parts = [
        text(16, 28, "How busy each step keeps an H100 (modelled, data sheet)", size=15, bold=True),
        text(left + wide + 60, top - 12, "time of the step", size=12, colour=QUIET),
    ]
    words = []
    for index, (name, tokens) in enumerate(steps):
        y = top + index * gap
        arithmetic, memory = min(1.0, tokens / knee), min(1.0, knee / tokens)
        times = max(1.0, tokens / knee)
        parts.append(text(16, y + 30, name))
        parts += _meter(left, y, wide, arithmetic, GREEN)
        parts += _meter(left, y + 24, wide, memory, PURPLE)
        took = "that of the weights" if times == 1 else f"{times:.1f} times that"
        x = left + wide + 60
        parts += [text(x, y + 18, took, size=12), rect(x, y + 26, 20 * times, 10, BLUE)]
        words.append(f"{name}: arithmetic {arithmetic:.0%}, memory {memory:.0%}, time {took}.")
    y = top + len(steps) * gap + 4
    parts += legend(left, y, 110, (("arithmetic", GREEN), ("memory", PURPLE), ("idle", BLANK)))
    return svg(WIDTH, y + 32, *parts, label=" ".join(words))


def _meter(x: float, y: float, wide: float, share: float, fill: str) -> list[str]:
    return [
        rect(x, y, wide, 18, BLANK, stroke=QUIET),
        rect(x, y, wide * share, 18, fill),
        text(x + wide + 8, y + 14, f"{share:.0%}", size=12),
    ]


def _stalls(title: str, rows: Sequence[tuple[str, Pieces | None, int]], note: str = "") -> str:
    """Draw a row for each schedule, its steps end to end; `rows` name the prompt's pieces and the
    chats' tokens beside each.
    """
    scale = (WIDTH - LEFT - RIGHT) / (PROMPT + 4 * CHATS + 40)
    parts = [text(16, 28, title, size=15, bold=True)]
    words = [f"{title}."]
    for index, (name, prompt, chats) in enumerate(rows):
        y = TOP + index * 58
        parts.append(text(LEFT - 12, y + 20, name, anchor="end"))
        if prompt is None:
            parts.append(text(LEFT, y + 22, "?", size=20, bold=True))
            words.append(f"{name}: not known yet.")
            continue
        x = float(LEFT)
        for tokens in prompt:
            parts.append(rect(x, y, scale * tokens, BAR, ORANGE, label=f"{tokens:,}" if tokens > 150 else ""))
            x += scale * tokens
            if chats:
                parts.append(rect(x, y, 6, BAR, BLUE))
                x += 6
            parts.append(line((x, y - 5), (x, y + BAR + 5), QUIET, width=2))
        longest = max(prompt) + chats
        steps = f"{len(prompt)} steps, the longest" if len(prompt) > 1 else "one step"
        parts.append(text(LEFT, y + BAR + 17, f"{steps} of {longest:,} tokens", size=12, colour=QUIET))
        words.append(f"{name}: {steps} of {longest:,} tokens.")
    y = TOP + len(rows) * 58 + 8
    kinds = ((f"the prompt, {PROMPT:,} tokens", ORANGE), (f"a token of each of {CHATS} chats", BLUE))
    parts += [
        *legend(LEFT, y, 200, kinds),
        line((LEFT + 430, y - 1), (LEFT + 430, y + 15), QUIET, width=2),
        text(LEFT + 438, y + 12, "a step ends", size=12),
        *([text(LEFT, y + 38, note, size=12, colour=QUIET)] if note else []),
    ]
    return svg(WIDTH, y + (54 if note else 30), *parts, label=" ".join(words))
