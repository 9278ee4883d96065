"""Lesson 02's opening figure: the followed request's tokens, its block table, and where the tokens
are in the pool.
"""

from __future__ import annotations

from minivllm_lab.drawing import BLANK, QUIET, arrow, block, rect, svg, text, text_width, tint
from minivllm_lab.followed import BLOCK_SIZE, NAME, Followed, Row, Step, Token, followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, ORANGE

WIDTH, HEIGHT = 872, 372
SLOT, TALL, GAP = 50, 28, 12
KEY = 36
"""Pixels that a colour's key takes beside its words."""
COLUMNS, ROWS = 4, 3
COLOURS = {NAME: BLUE, "for": ORANGE, "class": GREEN}
OTHERS = {"for": "a second request", "class": "a third"}
LOGICAL_Y, TABLE_Y, POOL_Y, ROW_GAP = 62, 122, 212, 54


def frames() -> Frames:
    """Draw one still for each step of the request, and one of the pool after the request ends."""
    run = followed("company")
    pool: dict[int, tuple[str, str]] = {}  # slot -> (request, token), as the steps fill it
    stills, captions = [], []
    for step in run.steps:
        current = step.row()
        if current is None:
            break
        pool.update((slot, (row.request, token.shown)) for row in step.rows for slot, token in _written(row))
        stills.append(_still(run, current, pool))
        captions.append(_caption(current))
        if NAME in step.finished:
            held = {block for row in step.rows if row is not current for block in row.block_table}
            pool = {slot: token for slot, token in pool.items() if slot // BLOCK_SIZE in held}
            stills.append(_still(run, None, pool))
            captions.append(_after(step, current))
    return Frames(stills, captions)


def _written(row: Row) -> list[tuple[int, Token]]:
    return list(zip(row.slots, row.tokens, strict=True))


def _caption(row: Row) -> str:
    position, slot = row.positions[-1], row.slots[-1]
    table = ", ".join(map(str, row.block_table))
    if len(row.positions) > 1:
        return f"The prompt's {len(row.positions)} tokens take {len(row.block_table)} blocks: the table is {table}."
    entry, place = divmod(position, BLOCK_SIZE)
    block_id = row.block_table[entry]
    where = f"Position {position}: entry {entry} of the table is block {block_id}, place {place}: slot {slot}."
    if place == 0:
        return f"{where} The last block was full; any free one will do."
    return where


def _after(step: Step, row: Row) -> str:
    front, back = step.free_blocks[0], ", ".join(map(str, step.free_blocks[-3:]))
    kept = [block for block in row.block_table if block in step.free_blocks[-3:]]
    assert len(kept) == 3, "the captions know this scene"
    return f"The request ends. Block {front} begins the free list; the full blocks {back} go to its end (lesson 05)."


def _still(run: Followed, row: Row | None, pool: dict[int, tuple[str, str]]) -> str:
    sees = "the request sees" if row is not None else "the request has ended"
    shapes = [text(20, 24, sees, colour=QUIET), text(20, POOL_Y - 24, "the pool holds", colour=QUIET)]
    shapes += _keys()
    if row is not None:
        shapes += [_logical(run, row, index) for index in range(len(row.block_table))]
    shapes += [_physical(number, row, pool) for number in range(COLUMNS * ROWS)]
    label = "Blocks of the followed request, its block table, and the pool"
    return svg(WIDTH, HEIGHT, *shapes, label=label)


def _keys() -> list[str]:
    """Draw the key of colours, flush with the right margin."""
    words = {name: OTHERS.get(name, "our request") for name in COLOURS}
    x, shapes = WIDTH - 16 - sum(KEY + text_width(label) for label in words.values()), []
    for name, label in words.items():
        shapes += [rect(x, POOL_Y - 35, 13, 13, tint(COLOURS[name], 0.45))]
        shapes += [text(x + 19, POOL_Y - 24, label, colour=QUIET)]
        x += KEY + text_width(label)
    return shapes


def _logical(run: Followed, row: Row, index: int) -> str:
    """Draw one logical block and, below it, its entry in the block table."""
    size = BLOCK_SIZE
    tokens = [token.shown for token in run.request.tokens[: row.seq_len]][index * size : (index + 1) * size]
    x, fresh = _x(index), row.positions[-1] // size == index or len(row.positions) > 1
    fills = [_fill(NAME, index * size + place in row.positions) for place in range(size)]
    slots = tokens + [None] * (size - len(tokens))
    words = f"positions {index * size} to {(index + 1) * size - 1}"
    shapes = block(x, LOGICAL_Y, slots, width=SLOT, height=TALL, fill=fills, name=words)
    middle, number = x + 2 * SLOT, row.block_table[index]
    box = rect(
        middle - 50, TABLE_Y, 100, 26, tint(BLUE, 0.15) if fresh else "#FFFFFF", stroke=BLUE, radius=3, size=12,
        label=f"table[{index}] = {number}",
    )  # fmt: skip
    down = arrow((middle, LOGICAL_Y + TALL + 4), (middle, TABLE_Y - 3), BLUE if fresh else QUIET)
    return shapes + down + box


def _physical(number: int, row: Row | None, pool: dict[int, tuple[str, str]]) -> str:
    """Draw one block of the pool; only the followed request's tokens are written out."""
    size, x, y = BLOCK_SIZE, _x(number % COLUMNS), POOL_Y + number // COLUMNS * ROW_GAP
    held = [pool.get(number * size + place) for place in range(size)]
    now = set(row.slots) if row is not None else set()
    slots = [None if owned is None else owned[1] if owned[0] == NAME else " " for owned in held]
    fills = [BLANK if owned is None else _fill(owned[0], number * size + i in now) for i, owned in enumerate(held)]
    first, last = number * size, number * size + size - 1
    name = f"block {number}: slots {first} to {last}" if number else "block 0: the null block"
    in_table = row is not None and number in row.block_table
    return block(x, y, slots, width=SLOT, height=TALL, fill=fills, name=name, stroke=BLUE if in_table else "#80868B")


def _fill(name: str, now: bool) -> str:
    """Return a strong colour for a slot that this step writes and a pale one for the others."""
    return COLOURS[name] if now else tint(COLOURS[name], 0.35)


def _x(column: int) -> float:
    return 20 + column * (BLOCK_SIZE * SLOT + GAP)
