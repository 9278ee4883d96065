"""Draw lesson 10's opening: a long prompt arrives while the followed request decodes, first
computed in one piece, then in three.

The three pieces are the engine's steps in the scene "long prompt"; the single piece is scheduled by
`PREFILL_FIRST`, the policy of vLLM V0.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.chunked_prefill import stall
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.pictures.followed import MAX_TOKENS, NAME, Followed, Step, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, INK, ORANGE
from minivllm_simulate.cost_model import UnitCost
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

WIDTH, HEIGHT = 700, 336
LEFT, CELL, TALL = 72, 24.6, 30
LONG = "long"
COLOURS = {NAME: BLUE, LONG: ORANGE}
SHORT = 4
"""Characters that fit into a cell."""


def frames() -> Frames:
    """Draw six stills: the prompt waits, one piece, three pieces, both side by side."""
    run = followed("long prompt")
    prompt, output = run.requests[LONG].prompt, [token.shown for token in run.request.output]
    budget, pieces = run.max_num_batched_tokens, [step for step in run.steps if _tokens(step, LONG) > 1]
    sizes = [_tokens(step, LONG) for step in pieces]
    first = run.requests[LONG].output[0].shown
    undecided = text(LEFT, 100, "nothing is scheduled yet", colour=QUIET)
    whole = [(LONG, token.shown) for token in prompt]
    stills = [
        _still(run, "The followed request decodes, and a long prompt has arrived", 0, output[:1], undecided),
        _still(run, "Prefill first: a step of its own", len(prompt), output[:1], *_step(whole)),
    ]
    done = 0
    for number, (step, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
        done += size
        shown = [(row.request, token.shown) for row in step.rows for token in row.tokens]
        title = f"Mixed: {budget} tokens a step, piece {number} of {len(pieces)}"
        stills.append(_still(run, title, done, output[: 1 + number], *_step(shown, budget)))
    stills.append(_side_by_side(run))
    captions = [
        f"add has generated {output[0]} and needs one token computed; long's prompt has {len(prompt)}.",
        "Before: the whole prompt goes first, in a step of its own, so add waits.",
        f"Now: add gets its 1 token; {budget - 1} are left of the budget, so the prompt is cut there.",
        f"Again: add gets 1, long {sizes[1]}, which also see the keys of the first {sizes[0]}.",
        f"long gets its last {sizes[-1]}, and samples {first}. From now on both decode.",
        f"Before, {len(prompt)} tokens of long stand between two tokens of add; now at most {max(sizes)}.",
    ]
    return Frames(stills, captions)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": stall.bet(), "reveal": stall.reveal(), "meters": stall.meters()}


def _tokens(step: Step, name: str) -> int:
    row = step.row(name)
    return row.num_scheduled_tokens if row else 0


def _cells(x: float, y: float, cells: Sequence[tuple[str, str, str | None]], width: float, tall: float) -> list[str]:
    """Draw cells side by side, each with its text, fill and dash; replace text that is too long
    with "…".
    """
    return [
        rect(
            x + place * width, y, width, tall, fill, stroke=QUIET if dash else "#FFFFFF", dash=dash,
            label=shown if len(shown) <= SHORT else "…", mono=True, size=11,
        )
        for place, (shown, fill, dash) in enumerate(cells)
    ]  # fmt: skip


def _step(tokens: Sequence[tuple[str, str]], budget: int | None = None) -> list[str]:
    """Draw the step's tokens side by side, and what is left of its budget."""
    cells: list[tuple[str, str, str | None]] = [(shown, COLOURS[name], None) for name, shown in tokens]
    cells += [("", "#FFFFFF", "3 3")] * ((budget or len(cells)) - len(cells))
    return [text(LEFT - 12, 102, "the step", anchor="end"), *_cells(LEFT, 82, cells, CELL, TALL)]


def _still(run: Followed, title: str, computed: int, generated: Sequence[str], *step: str) -> str:
    prompt = run.requests[LONG].prompt
    cells: list[tuple[str, str, str | None]] = [
        (token.shown, tint(ORANGE, 0.55) if place < computed else BLANK, None) for place, token in enumerate(prompt)
    ]
    return svg(
        WIDTH, HEIGHT, text(20, 32, title, size=15, bold=True), *step,
        text(LEFT - 12, 190, LONG, anchor="end", mono=True), *_cells(LEFT, 170, cells, CELL, TALL),
        text(LEFT, 218, f"{computed} of {len(prompt)} tokens in the cache", size=12, colour=QUIET),
        text(LEFT - 12, 270, NAME, anchor="end", mono=True),
        *(rect(LEFT + place * 62, 250, 58, TALL, tint(BLUE, 0.45), label=shown, mono=True, size=12)
          for place, shown in enumerate(generated)),
        text(LEFT, 298, "generated so far", size=12, colour=QUIET), label=title,
    )  # fmt: skip


def _before(run: Followed) -> list[dict[str, int]]:
    """Return the steps that `PREFILL_FIRST` schedules for the same requests."""
    limits = SchedulerConfig(max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=False)
    cache = CacheConfig(num_gpu_blocks=99, enable_prefix_caching=False)
    names = (NAME, LONG)
    work = [SimulatedRequest(len(run.requests[name].prompt), MAX_TOKENS, at) for at, name in enumerate(names)]
    steps = simulate(work, Scheduler(limits, cache, PREFILL_FIRST), UnitCost()).steps
    return [{names[int(index)]: tokens for index, tokens in step.scheduled.items()} for step in steps]


def _side_by_side(run: Followed) -> str:
    """Draw both schedules on one axis of computed tokens, and mark where add generates a token."""
    mixed = [{row.request: row.num_scheduled_tokens for row in step.rows} for step in run.steps]
    parts, wide = [text(20, 32, "The same tokens, in two orders", size=15, bold=True)], 12.0
    for y, name, steps in ((92, "before", _before(run)), (212, "now", mixed)):
        parts.append(text(LEFT - 12, y + 20, name, anchor="end"))
        x = float(LEFT)
        for scheduled in steps:
            for request, count in scheduled.items():
                parts.append(rect(x, y, wide * count, TALL, COLOURS[request], stroke="#FFFFFF"))
                x += wide * count
            parts.append(line((x, y - 8), (x, y + TALL + 8), RULE))
            if NAME in scheduled:
                parts.append(arrow((x, y + TALL + 26), (x, y + TALL + 10), BLUE))
    key = [(NAME, BLUE), (LONG, ORANGE)]
    for place, (name, colour) in enumerate(key):
        parts += [
            rect(LEFT + place * 110, 282, 16, 16, colour),
            text(LEFT + 22 + place * 110, 295, name, mono=True, size=12),
        ]
    words = "↑ add generates a token; lines end steps; the length is the number of tokens"
    parts.append(text(LEFT, 322, words, size=12, colour=INK))
    return svg(WIDTH, HEIGHT, *parts, label="Prefill first and mixed steps on one axis")
