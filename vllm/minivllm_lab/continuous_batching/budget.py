"""Lesson 04's pictures of the token budget: a bar for each step, filled by the requests in the order
in which the scheduler serves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, legend, rect, svg, text
from minivllm_lab.pictures.followed import followed
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, SKY, VERMILLION
from minivllm_simulate.cost_model import UnitCost
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

WIDTH, LEFT, CELL, BAR, GAP = 700, 100, 40, 28, 10
BUDGET, THRESHOLD = 12, 8
COLOURS = {"add": BLUE, "for": ORANGE, "class": GREEN, "long": VERMILLION, "chat": SKY}
DASH = "4 3"

Served = Mapping[str, int]
"""Tokens by request, in the order in which the scheduler gave them out."""


def long_before_chat() -> list[dict[str, int]]:
    """Return the engine's steps for a prompt of 20 tokens and a chat that arrived just after it."""
    limits = SchedulerConfig(max_model_len=64, max_num_batched_tokens=BUDGET, long_prefill_token_threshold=THRESHOLD)
    work = [SimulatedRequest(20, 3), SimulatedRequest(3, 4)]
    run = simulate(work, Scheduler(limits, CacheConfig(num_gpu_blocks=100)), UnitCost())
    return [{("long", "chat")[int(index)]: tokens for index, tokens in step.scheduled.items()} for step in run.steps]


def bet() -> str:
    """Draw the step before the bet, and the step that the bet is about, still empty."""
    first = long_before_chat()[0]
    bars = [("step 1", first, ""), ("step 2", None, "")]
    notes = [
        "long has 12 tokens of its prompt left, and may have 8 of them in this step.",
        "chat lacks one token: the next word, for which its user is waiting.",
    ]
    return _picture("Who is first in line for step 2?", bars, ("long", "chat"), notes)


def reveal() -> str:
    """Draw the second step as the documentation orders it, and the engine's real steps."""
    steps = long_before_chat()
    documented = {name: steps[1][name] for name in ("chat", "long")}
    bars = [("step 2", documented, "by the docs"), *((f"step {i + 1}", steps[i], "as it runs") for i in (1, 2, 3))]
    return _picture("long goes first, because it was admitted first", bars, ("long", "chat"))


def followed_steps() -> str:
    """Draw every step of the three requests that the lesson carries by hand."""
    run = followed("company")
    bars = []
    for step in run.steps:
        served = {row.request: row.num_scheduled_tokens for row in step.rows}
        sampled = [row.request for row in step.rows if row.sampled]
        bars.append((f"step {step.index + 1}", served, ", ".join(sampled)))
    return _picture("Every step, 12 tokens of budget", bars, ("add", "for", "class"), right="samples")


def _picture(
    title: str, bars: Sequence[tuple[str, Served | None, str]], names: Sequence[str], notes: Sequence[str] = (),
    right: str = "",
) -> str:  # fmt: skip
    """Draw bars below each other with a name on the left and a remark on the right; None is a bar
    that is not known yet.
    """
    top = 54
    parts = [text(16, 28, title, size=15, bold=True)]
    end = LEFT + BUDGET * CELL
    parts.append(text(end + 12, top - 8, right, size=12, colour=QUIET))
    for index, (name, served, remark) in enumerate(bars):
        y = top + index * (BAR + GAP)
        parts += [text(LEFT - 12, y + 19, name, anchor="end"), text(end + 12, y + 19, remark, size=12)]
        parts += _unknown(y) if served is None else _bar(y, served)
    y = top + len(bars) * (BAR + GAP) + 8
    for index, note in enumerate(notes):
        parts.append(text(LEFT, y + 12 + index * 20, note))
    y += 20 * len(notes) + (8 if notes else 0)
    kinds = [*((name, COLOURS[name]) for name in names), ("budget left over", BLANK)]
    parts += legend(LEFT, y, 90, kinds, stroke=BORDER)
    return svg(WIDTH, y + 30, *parts, label=_label(title, bars, notes))


def _bar(y: float, served: Served) -> list[str]:
    x = float(LEFT)
    parts = [rect(LEFT, y, BUDGET * CELL, BAR, BLANK, stroke=BORDER)]
    for name, tokens in served.items():
        width = tokens * CELL
        words = f"{name} {tokens}" if tokens > 1 else str(tokens)
        parts.append(rect(x, y, width, BAR, COLOURS[name], stroke="#FFFFFF", label=words))
        x += width
    return parts


def _unknown(y: float) -> list[str]:
    return [rect(LEFT, y, BUDGET * CELL, BAR, "#FFFFFF", stroke=QUIET, dash=DASH, label="?", size=16)]


def _label(title: str, bars: Sequence[tuple[str, Served | None, str]], notes: Sequence[str]) -> str:
    """Say the picture in words, for screen readers."""
    lines = []
    for name, served, remark in bars:
        tokens = ", ".join(f"{request} {count}" for request, count in served.items()) if served else "not known yet"
        lines.append(f"{name}: {tokens}{f' ({remark})' if remark else ''}.")
    return " ".join([f"{title}.", *lines, *notes])
