"""The followed request on its way through the engine: it waits, is computed into blocks, decodes,
and frees them.
"""

from __future__ import annotations

from collections.abc import Iterable

from minivllm_lab.drawing import QUIET, RULE, arrow, block, rect, svg, text, tint
from minivllm_lab.followed import NAME, Followed, Row, Step, Token, followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, ORANGE

WIDTH, HEIGHT, MARGIN = 700, 432, 16
HELD, NEW, SAMPLED = tint(BLUE, 0.3), tint(ORANGE, 0.75), tint(GREEN, 0.45)
CHIP_HEIGHT = 26
BOXES_Y, BOXES_HEIGHT = 74, 74
WAITING, MODEL, NEXT = (MARGIN, 100), (158, 370), (570, 114)  # x and width of each box
POOL_Y, COLUMNS, SLOT, BLOCK_HEIGHT = 212, 4, 40, 26
COLUMN_WIDTH, ROW_HEIGHT = 169, 50


def frames() -> Frames:
    """Return a still of the waiting request, one for each step, and one of the finished request."""
    run = followed()
    count = _tokens(len(run.request.prompt))
    waits = f"A request arrives. Its {count} wait until the scheduler has room for them in a step."
    stills = [(_waiting(run), waits)]
    stills += [(_step(run, step), _caption(run, step)) for step in run.steps]
    stills.append((_ended(run), _last_words(run)))
    return Frames(*zip(*stills, strict=True))


def _waiting(run: Followed) -> str:
    prompt = run.request.prompt
    boxes = (_box(WAITING, "waiting", [_chips(WAITING, [_tokens(len(prompt))], HELD)]), _box(MODEL, "the model"))
    return _still(run, prompt, *boxes, _box(NEXT, "next token"), _pool(run, None, run.num_blocks - 1))


def _step(run: Followed, step: Step) -> str:
    row = _row(step)
    known = run.request.tokens[: row.seq_len]
    fed = [_chips(MODEL, [token.shown for token in row.tokens], NEW)]
    sampled = [_chips(NEXT, [row.sampled.shown], SAMPLED)] if row.sampled else []
    down = arrow((MODEL[0] + 100, BOXES_Y + BOXES_HEIGHT), (MODEL[0] + 100, POOL_Y - 24), width=2)
    name = text(MODEL[0] + 110, BOXES_Y + BOXES_HEIGHT + 20, "keys and values, into slots", size=11.5, colour=QUIET)
    boxes = (
        _box(WAITING, "waiting"),
        _box(MODEL, f"step {step.index + 1}: {_tokens(row.num_scheduled_tokens)} through the model", fed),
        _box(NEXT, "next token", sampled),
    )
    held = run.num_blocks - 1 - len(row.block_table)
    return _still(run, known, *boxes, down, name, _pool(run, row, held))


def _ended(run: Followed) -> str:
    boxes = (_box(WAITING, "waiting"), _box(MODEL, "the model"), _box(NEXT, "next token"))
    return _still(run, run.request.tokens, *boxes, _pool(run, None, run.num_blocks - 1, run.steps[-1]))


def _still(run: Followed, known: tuple[Token, ...], *parts: str) -> str:
    """Return the text so far at the top, with the three boxes and the pool below it."""
    start, y = MARGIN + 72, 16
    shown, x = [text(MARGIN, y + 18, "the text", size=12, colour=QUIET)], float(start)
    for index, token in enumerate(known):
        fill = HELD if index < len(run.request.prompt) else SAMPLED
        shown.append(_chip(x, y, token.shown, fill))
        x += _chip_width(token.shown) + 3
    flow = [
        arrow((WAITING[0] + WAITING[1] + 8, BOXES_Y + 44), (MODEL[0] - 8, BOXES_Y + 44), width=2),
        arrow((MODEL[0] + MODEL[1] + 8, BOXES_Y + 44), (NEXT[0] - 8, BOXES_Y + 44), width=2),
    ]
    label = "".join(token.text for token in known)
    return svg(WIDTH, HEIGHT, *shown, *flow, *parts, label=f"The engine, and the request's text so far: {label!r}")


def _box(place: tuple[float, float], name: str, content: Iterable[str] = ()) -> str:
    x, width = place
    frame = rect(x, BOXES_Y + 16, width, BOXES_HEIGHT - 16, "#FFFFFF", stroke=RULE, stroke_width=1.5, radius=6)
    return text(x, BOXES_Y + 8, name, size=12, colour=QUIET) + frame + "".join(content)


def _chips(box: tuple[float, float], pieces: list[str], fill: str) -> str:
    """Return chips in the middle of a box."""
    widths = [_chip_width(piece) for piece in pieces]
    x = box[0] + (box[1] - sum(widths) - 3 * (len(widths) - 1)) / 2
    shown = []
    for piece, width in zip(pieces, widths, strict=True):
        shown.append(_chip(x, BOXES_Y + 32, piece, fill))
        x += width + 3
    return "".join(shown)


def _chip(x: float, y: float, piece: str, fill: str) -> str:
    return rect(x, y, _chip_width(piece), CHIP_HEIGHT, fill, radius=4, label=piece, mono=True, size=12)


def _chip_width(piece: str) -> float:
    return max(20.0, len(piece) * 7.6 + 9)


def _pool(run: Followed, row: Row | None, num_free: int, last: Step | None = None) -> str:
    """Return all blocks. Those of `row` are filled; after the `last` step, what free blocks still
    hold is grey.
    """
    holder = row or (_row(last) if last else None)
    table = f"; the request's block table: {list(row.block_table)}" if row else ""
    title = f"KV cache: {run.num_blocks - 1} blocks of {run.block_size} slots, {num_free} free{table}"
    shown = [text(MARGIN, POOL_Y - 8, title, size=12, colour=QUIET)]
    for index in range(run.num_blocks - 1):
        slots, fills = _slots(run, holder, index + 1)
        if not row:  # nobody holds it: only what the prefix cache knows can be found
            cached = last is not None and index + 1 in last.cached_blocks
            slots, fills = (slots if cached else [None] * run.block_size), ["#E8EAED"] * run.block_size
        x, y = MARGIN + index % COLUMNS * COLUMN_WIDTH, POOL_Y + 18 + index // COLUMNS * ROW_HEIGHT
        stroke = "#3C4043" if row and index + 1 in row.block_table else RULE
        name = f"block {index + 1}"
        shown.append(block(x, y, slots, width=SLOT, height=BLOCK_HEIGHT, fill=fills, stroke=stroke, name=name))
    return "".join(shown)


def _slots(run: Followed, row: Row | None, block_id: int) -> tuple[list[str | None], list[str]]:
    """Return the contents of a block's slots and their colours, which highlight this step's tokens."""
    slots: list[str | None] = [None] * run.block_size
    fills = [HELD] * run.block_size
    if row is None or block_id not in row.block_table:
        return slots, fills
    first = row.block_table.index(block_id) * run.block_size
    for offset, token in enumerate(run.request.tokens[first : min(first + run.block_size, row.seq_len)]):
        slots[offset] = token.shown
        fills[offset] = NEW if first + offset >= row.num_computed_tokens else HELD
    return slots, fills


def _caption(run: Followed, step: Step) -> str:
    row = _row(step)
    if step.index == 0:
        blocks = ", ".join(map(str, row.block_table))
        return (
            f"Prefill: one step computes all {row.num_scheduled_tokens} tokens. Their keys and values fill free "
            f"blocks: {blocks}."
        )
    before = _row(run.steps[step.index - 1])
    fed = f"Decode: only {row.tokens[0].shown} goes through the model"
    if len(row.block_table) > len(before.block_table):
        return f"{fed}. Block {row.block_table[-2]} was full, so it takes block {row.block_table[-1]}."
    return f"{fed}, and sees {row.num_computed_tokens} tokens in the cache. Next: {_shown(row)}."


def _last_words(run: Followed) -> str:
    known = len(run.steps[-1].cached_blocks)
    return (
        f"{len(run.request.output)} tokens are written, and the blocks are free. A request that begins alike may find "
        f"{known} again."
    )


def _shown(row: Row) -> str:
    return row.sampled.shown if row.sampled else "none"


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _row(step: Step) -> Row:
    row = step.row(NAME)
    assert row is not None
    return row
