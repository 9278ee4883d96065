"""Draw lesson 12's opening: a step whose requests have different adapters. The token indices are
sorted; the tokens are not moved.

The step is the first one of the scene "six chats" in which all six decode. The adapters are those of
the lesson's example; the groups are computed as the engine computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm_lab.multi_lora import gate
from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, line, rect, svg, text, tint
from minivllm_lab.pictures.followed import NAME, Row, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE

WIDTH, HEIGHT = 700, 372
LEFT, CELL, TALL = 118, 94, 30
SLOTS = {NAME: 2, "for": 0, "class": -1, "import": 2, "if": 0, "while": 2}
"""The slot of each request's adapter; -1 is the base model."""
HIDDEN, RANK = ModelConfig.from_pretrained(EMBEDDED_MODEL).hidden_size, 8
COLOURS = {0: BLUE, 2: ORANGE, -1: QUIET}
BATCH, LISTS, SMALL, OUT = 84, 162, 238, 306

Cell = tuple[str, str, int]
"""A token's text, request and slot."""


def frames() -> Frames:
    """Draw eight stills: the batch, a loop, bgmv, sgmv, the groups, shrink, expand, the result."""
    cells = _cells()
    slots = [slot for _, _, slot in cells]
    of_slot = {kind: [token for token, slot in enumerate(slots) if slot == kind] for kind in sorted({*slots} - {-1})}
    order, active = list(chain(*of_slot.values())), list(of_slot)
    starts = [0, *accumulate(map(len, of_slot.values()))]
    stills = [
        _still(cells, "One step: W is shared, the adapters are not", *_shared(), *_out([-1] * len(cells), "W x")),
        _still(cells, "A loop: one adapter after another", *_loop(of_slot)),
        _still(cells, "bgmv: every token reads an adapter", *_reads([[t] for t in order], slots)),
        _still(cells, "sgmv: rows are copied side by side", *_segments(of_slot)),
        _still(cells, "Sorted: token indices, by slot", *_lists(order, active, starts)),
        _still(cells, "Shrink: one launch, each adapter's A once", *_lists(order, active, starts), *_small(slots)),
        _still(cells, "Expand: one launch, each adapter's B once", *_small(slots), *_out(slots)),
        _still(cells, "No token was moved", *_out(slots), *_reads(list(of_slot.values()), slots)),
    ]
    assert slots == [2, 0, -1, 2, 0, 2], "a caption and the lesson's table count them"
    counts = {slot: len(tokens) for slot, tokens in of_slot.items()}
    captions = [
        "Six chats, a token each: three use slot 2, two slot 0, one the base model.",
        f"A loop: two launches for each adapter, so {2 * len(of_slot)} in this projection.",
        f"bgmv: a program for each token. The adapter in slot 2 is read {counts[2]} times.",
        "sgmv: each adapter is read once, but rows are copied together and back.",
        f"Sorted: only the tokens' indices move. Token {slots.index(-1)} has no adapter, so no group has it.",
        f"Each group reads A once, and turns {HIDDEN} numbers of each token into {RANK}.",
        "Each group reads B once, multiplies it by A x, and adds that to W x.",
        "No token was moved. A step pays for how many different adapters it has.",
    ]
    return Frames(stills, captions)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": gate.bet(), "reveal": gate.reveal(), "memory": gate.memory()}


def _cells() -> list[Cell]:
    """Return the tokens of the step in which all requests decode, in the batch's order."""
    step = next(
        step for step in followed("six chats").steps if step.query_start_loc[-1] == len(step.rows) == len(SLOTS)
    )
    rows: list[Row] = sorted(step.rows, key=lambda row: row.query_start)
    return [(token.shown, row.request, SLOTS[row.request]) for row in rows for token in row.tokens]


def _x(token: int) -> float:
    return LEFT + token * CELL


def _middle(token: float) -> float:
    return LEFT + token * CELL + CELL / 2 - 2


def _still(cells: Sequence[Cell], title: str, *parts: str) -> str:
    shown = [text(20, 32, title, size=15, bold=True), text(LEFT - 12, BATCH + 20, "the step", anchor="end")]
    for token, (piece, request, slot) in enumerate(cells):
        fill = tint(COLOURS[slot], 0.5) if slot >= 0 else BLANK
        shown.append(rect(_x(token), BATCH, CELL - 4, TALL, fill, label=piece, mono=True, size=12))
        shown.append(text(_middle(token), BATCH - 8, str(token), size=11, colour=QUIET, anchor="middle"))
        whose = f"{request}: slot {slot}" if slot >= 0 else f"{request}: none"
        shown.append(text(_middle(token), BATCH + TALL + 16, whose, size=12, colour=QUIET, anchor="middle"))
    return svg(WIDTH, HEIGHT, *shown, *parts, label=title)


def _lists(order: Sequence[int], active: Sequence[int], starts: Sequence[int]) -> list[str]:
    """Draw the step's lists: token indices, and where each slot begins."""
    parts = [text(LEFT - 12, LISTS + 20, "order", anchor="end")]
    for place, token in enumerate(order):
        slot = next(slot for slot, start in reversed(list(zip(active, starts, strict=False))) if start <= place)
        parts.append(_index(place, LISTS, token, slot))
    for slot, start in zip(active, starts, strict=False):
        words = f"slot {slot} begins at {start}"
        parts.append(text(_x(start), LISTS + TALL + 18, words, size=12, colour=QUIET))
    parts.append(text(_x(len(order)), LISTS + 20, f"end: {len(order)}", size=12, colour=QUIET))
    return parts


def _loop(of_slot: dict[int, list[int]]) -> list[str]:
    """Draw a row of picked tokens for each adapter."""
    parts = []
    for number, (slot, tokens) in enumerate(of_slot.items()):
        y = LISTS + number * 62
        parts.append(text(LEFT - 12, y + 20, f"launches {2 * number + 1}, {2 * number + 2}", anchor="end", size=12))
        parts += [_index(place, y, token, slot) for place, token in enumerate(tokens)]
        parts.append(text(_x(len(tokens)) + 8, y + 20, f"A, then B, of slot {slot}", size=12, colour=INK))
    return parts


def _segments(of_slot: dict[int, list[int]]) -> list[str]:
    """Draw the rows copied side by side by slot, and an adapter for each run of them."""
    parts = [
        text(LEFT - 12, y + 20, name, anchor="end") for y, name in ((SMALL, "copied rows"), (OUT, "adapters read"))
    ]
    first = 0
    for slot, tokens in of_slot.items():
        middle = _x(first) + (len(tokens) * CELL - 4) / 2
        for place, token in enumerate(tokens, start=first):
            parts.append(arrow((_middle(token), BATCH + TALL + 24), (_middle(place), SMALL - 4), COLOURS[slot]))
            parts.append(_index(place, SMALL, token, slot))
        first += len(tokens)
        parts += [line((middle, SMALL + TALL), (middle, OUT), COLOURS[slot], opacity=0.6), _adapter(middle, OUT, slot)]
    return parts


def _shared() -> list[str]:
    """Draw the one matmul with the base model's weight, as wide as the batch."""
    wide, y = len(SLOTS) * CELL - 4, LISTS + 34
    parts = [text(LEFT - 12, y + 20, "base model", anchor="end")]
    parts.append(rect(LEFT, y, wide, TALL, GREEN, label="one matmul with W, for all tokens"))
    for x in map(_middle, range(len(SLOTS))):
        parts += [arrow((x, BATCH + TALL + 24), (x, y - 4)), arrow((x, y + TALL), (x, OUT - 4))]
    return parts


def _index(place: int, y: float, token: int, slot: int) -> str:
    return rect(_x(place), y, CELL - 4, TALL, tint(COLOURS[slot], 0.5), label=str(token), mono=True, size=13)


def _adapter(middle: float, y: float, slot: int) -> str:
    return rect(middle - 44, y, 88, TALL, COLOURS[slot], radius=4, label=f"A, B of slot {slot}", size=12)


def _reads(groups_of: Sequence[Sequence[int]], slots: Sequence[int]) -> list[str]:
    """Draw an adapter for each group, linked to its tokens."""
    parts = [text(LEFT - 12, LISTS + 34, "adapters read", anchor="end", size=12)]
    for index, tokens in enumerate(groups_of):
        slot = slots[tokens[0]]
        column = tokens[0] if len(tokens) == 1 else (index + 0.5) * len(slots) / len(groups_of) - 0.5
        middle = _middle(column)
        ends = [(_middle(token), BATCH + TALL + 22) for token in tokens]
        parts += [line((middle, LISTS + 14), end, COLOURS[slot], opacity=0.6) for end in ends]
        parts.append(_adapter(middle, LISTS + 14, slot))
    return parts


def _small(slots: Sequence[int]) -> list[str]:
    """Draw the output of shrink: a few numbers for each token with an adapter."""
    parts = [text(LEFT - 12, SMALL + 16, "A x", anchor="end")]
    for token, slot in enumerate(slots):
        if slot >= 0:
            x = _middle(token) - 12
            parts.append(rect(x, SMALL, 24, 22, COLOURS[slot], radius=3, label=str(RANK), mono=True, size=12))
    return parts


def _out(slots: Sequence[int], name: str = "W x + B A x") -> list[str]:
    """Draw the base model's output and what is added to it."""
    parts = [text(LEFT - 12, OUT + 20, name, anchor="end")]
    for token, slot in enumerate(slots):
        label = str(HIDDEN) if slot < 0 else f"{HIDDEN} +"
        parts.append(rect(_x(token), OUT, CELL - 4, TALL, tint(GREEN, 0.4), label=label, mono=True, size=12))
        if slot >= 0:
            x = _middle(token)
            parts.append(arrow((x, SMALL + 26), (x, OUT - 4), COLOURS[slot], width=2))
    return parts
