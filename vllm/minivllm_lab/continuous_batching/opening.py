"""Lesson 04's pictures of one step, in which a decode, a whole prompt and a chunk of a prompt share
a forward pass.

It is the second step of the scene "company": the followed request decodes, and two others have just
arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm_lab.continuous_batching import budget
from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, swatch, text, tint
from minivllm_lab.pictures.followed import Followed, Row, Step, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE

WIDTH, HEIGHT = 700, 350
LEFT, CELL, TALL = 72, 51, 30
TILE = 4
COLOURS = (BLUE, ORANGE, GREEN)
DASH = "4 3"


def frames() -> Frames:
    """Draw six stills: missing tokens, padding, end to end, tiles, visible keys, the whole step."""
    run = followed("company")
    step = run.steps[1]
    return Frames(
        [
            _wanted(run, step),
            _padded(step),
            _end_to_end(step),
            _tiles(step),
            _seen("The keys that each row sees", step),
            _seen("The whole step", step, samples=True),
        ],
        [
            "add lacks one token, for lacks five, class lacks ten. Twelve fit into the step.",
            "Padded to a rectangle, twelve tokens would take eighteen places.",
            "So lay the tokens end to end: norms and matmuls do not ask whose token it is.",
            "Attention does ask. It runs in tiles of four rows, and no tile straddles two requests.",
            "Each row sees its own request's keys, up to itself: a decode ten, a chunk a staircase.",
            "The whole step: three requests, twelve rows, one launch. Two have caught up, so two sample.",
        ],
    )


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    step = followed("company").steps[1]
    return {
        "bet": budget.bet(),
        "reveal": budget.reveal(),
        "budget": budget.followed_steps(),
        "tiles": _tiles(step),
        "staircase": _seen("The keys that each row sees", step),
    }


def _still(title: str, *elements: str) -> str:
    return svg(WIDTH, HEIGHT, text(20, 30, title, size=15, bold=True), *elements, label=title)


def _cell(x: float, y: float, content: str, fill: str, width: float = CELL, dash: str | None = None) -> str:
    stroke = QUIET if dash else "#FFFFFF"
    return rect(x, y, width, TALL, fill, stroke=stroke, dash=dash, label=content, mono=True, size=11)


def _name(y: float, name: str) -> str:
    return text(LEFT - 12, y + TALL / 2 + 5, name, size=13, anchor="end", mono=True)


def _wanted(run: Followed, step: Step) -> str:
    parts = []
    for index, row in enumerate(step.rows):
        y, end = 62 + index * 76, row.seq_len
        known = run.requests[row.request].tokens[: max(end, len(run.requests[row.request].prompt))]
        parts.append(_name(y, row.request))
        for place, token in enumerate(known):
            computed, new = place < row.num_computed_tokens, place < end
            fill = tint(COLOURS[index]) if computed else COLOURS[index] if new else "#FFFFFF"
            parts.append(_cell(LEFT + place * CELL, y, token.shown, fill, dash=None if new else DASH))
        cut = " of 10" if end < len(known) else ""
        parts.append(text(LEFT, y + TALL + 18, f"gets {row.num_scheduled_tokens}{cut}", size=12, colour=QUIET))
    parts += _swatch(LEFT, 306, map(tint, COLOURS), "in the cache")
    parts += _swatch(LEFT + 190, 306, COLOURS, "computed in this step")
    parts.append(swatch(LEFT + 400, 306, "#FFFFFF", "later", dash=DASH))
    return _still("What each request lacks", *parts)


def _swatch(x: float, y: float, fills: Iterable[str], words: str) -> list[str]:
    """Explain what a colour of each request means."""
    boxes = [rect(x + index * 13, y, 13, 14, fill, stroke="#FFFFFF") for index, fill in enumerate(fills)]
    return [*boxes, text(x + 47, y + 12, words, size=12)]


def _padded(step: Step) -> str:
    widest, parts = max(row.num_scheduled_tokens for row in step.rows), []
    for index, row in enumerate(step.rows):
        y = 80 + index * (TALL + 14)
        parts.append(_name(y, row.request))
        for place in range(widest):
            x, tokens = LEFT + place * CELL, row.tokens
            filled = place < len(tokens)
            content, fill = (tokens[place].shown, COLOURS[index]) if filled else ("padding", BLANK)
            parts.append(_cell(x, y, content, fill, dash=None if filled else DASH))
    total = sum(row.num_scheduled_tokens for row in step.rows)
    count = f"{len(step.rows)} × {widest} = {len(step.rows) * widest} places for {total} tokens"
    return _still("As a rectangle", *parts, text(LEFT, 250, count, size=14))


def _strip(step: Step, y: float) -> list[str]:
    """Draw all new tokens end to end."""
    return [
        _cell(LEFT + (row.query_start + place) * CELL, y, token.shown, COLOURS[index])
        for index, row in enumerate(step.rows)
        for place, token in enumerate(row.tokens)
    ]


def _end_to_end(step: Step) -> str:
    y, total = 90, step.query_start_loc[-1]
    parts = [_name(y, "rows"), *_strip(step, y)]
    for start in step.query_start_loc:
        x = LEFT + start * CELL
        parts += [line((x, y + TALL + 4), (x, y + TALL + 16)), text(x, y + TALL + 32, str(start), anchor="middle")]
    starts = ", ".join(map(str, step.query_start_loc))
    parts.append(text(LEFT, y + TALL + 56, f"query_start_loc = [{starts}]", mono=True))
    parts.append(arrow((LEFT + total * CELL / 2, 184), (LEFT + total * CELL / 2, 216)))
    parts.append(
        rect(LEFT, 222, total * CELL, 44, tint(INK, 0.1), stroke=QUIET, label=f"{total} rows × weights: one matmul")
    )
    return _still("End to end", *parts)


def _tiles(step: Step) -> str:
    y, parts = 236, []
    count = step.query_start_loc[-1] // TILE + len(step.rows)
    wide = (step.query_start_loc[-1] * CELL - (count - 1) * 8) / count
    first = [row.query_start // TILE + index for index, row in enumerate(step.rows)]
    for tile in range(count):
        index = max(i for i, begin in enumerate(first) if begin <= tile)
        row, x = step.rows[index], LEFT + tile * (wide + 8)
        begin = (tile - first[index]) * TILE
        held = min(TILE, row.num_scheduled_tokens - begin)
        parts.append(rect(x, 74, wide, 50, tint(COLOURS[index]) if held > 0 else BLANK, stroke=QUIET))
        parts.append(text(x + wide / 2, 94, f"tile {tile}", anchor="middle", bold=True))
        words = f"{row.request}: {held} row{'s' * (held > 1)}" if held > 0 else "no row: returns"
        parts.append(text(x + wide / 2, 114, words, size=12, anchor="middle"))
        if held > 0:
            left = LEFT + (row.query_start + begin) * CELL
            parts.append(arrow((x + wide / 2, 126), (left + held * CELL / 2, y - 14)))
            parts.append(line((left + 3, y - 8), (left + held * CELL - 3, y - 8), COLOURS[index], width=4))
    parts += [_name(y, "rows"), *_strip(step, y)]
    rule = ",  ".join(
        f"{row.request} {row.query_start} // {TILE} + {i} = {first[i]}" for i, row in enumerate(step.rows)
    )
    parts.append(text(LEFT, y + TALL + 34, f"first tiles:  {rule}", mono=True, size=12))
    return _still("Tiles find their rows", *parts)


def _seen(title: str, step: Step, samples: bool = False) -> str:
    """Draw a line for each row of the batch and a column for each key of each request."""
    left, top, wide, tall = 68, 64, 22, 20
    parts = []
    column = 0
    columns = sum(row.seq_len for row in step.rows)
    right = left + columns * wide + 12
    for index, row in enumerate(step.rows):
        x = left + column * wide
        parts.append(text(x + row.seq_len * wide / 2, top - 10, f"keys of {row.request}", size=12, anchor="middle"))
        for place in range(row.num_scheduled_tokens):
            y = top + (row.query_start + place) * tall
            sees = row.num_computed_tokens + place + 1
            parts += _sees(row, place, index, (x, y), (wide, tall))
            parts.append(text(left - 10, y + 15, row.tokens[place].shown, size=12, anchor="end", mono=True))
            parts.append(text(right, y + 15, f"sees {sees}", size=12))
        if samples:
            last = top + (row.query_start + row.num_scheduled_tokens - 1) * tall + 15
            parts += _sample(row, right + 58, last)
        column += row.seq_len
    parts += _swatch(left, 322, COLOURS, "a key that the row sees")
    parts += _swatch(left + 230, 322, (BLANK,) * 3, "a later key of the same request: hidden")
    frame = rect(left, top, columns * wide, step.query_start_loc[-1] * tall, stroke=RULE)
    return _still(title, frame, *parts)


def _sample(row: Row, x: float, y: float) -> list[str]:
    """Say beside a request's last row what it samples."""
    if row.sampled is None:
        return [text(x, y, "not caught up", size=12, colour=QUIET)]
    return [arrow((x, y - 4), (x + 20, y - 4)), text(x + 26, y, row.sampled.shown, size=12, mono=True)]


def _sees(row: Row, place: int, index: int, corner: tuple[float, float], size: tuple[float, float]) -> Sequence[str]:
    sees = row.num_computed_tokens + place + 1
    return [
        rect(corner[0] + key * size[0], corner[1], *size, COLOURS[index] if key < sees else BLANK, stroke="#FFFFFF")
        for key in range(row.seq_len)
    ]
