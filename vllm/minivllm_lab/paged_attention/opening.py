"""Lesson 02's pictures. The moving one: the followed request's tokens, its block table, and where
the tokens are in the pool.
"""

from __future__ import annotations

from minivllm_lab.paged_attention import holes, shared_blocks
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, arrow, block, line, rect, svg, text, tint
from minivllm_lab.pictures.followed import BLOCK_SIZE, NAME, Followed, Row, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, VERMILLION

WIDTH, HEIGHT = 700, 390
LEFT, SLOT, TALL, GAP = 16, 40, 28, 9

COLUMNS, BLOCKS = 4, 12
COLOURS = {NAME: BLUE, "for": ORANGE, "class": GREEN}
KEYS = ((176, BLUE, "our request"), (300, ORANGE, "a second"), (404, GREEN, "a third; dark: written in this step"))
LOGICAL_Y, TABLE_Y, POOL_Y, ROW_GAP = 62, 122, 212, 66
VERMILLION_INK = "#A84300"
"""A darker form for text on white, with a contrast of at least 4.5 : 1."""


def frames() -> Frames:
    """Draw one still for each step of the request, and one that sums them up."""
    run = followed("company")
    rows = [row for step in run.steps if (row := step.row()) is not None]
    pool: dict[int, tuple[str, str]] = {}  # slot -> (request, token), as the steps fill it
    stills = []
    for step, current in zip(run.steps, rows, strict=False):
        for row in step.rows:
            pool.update((slot, (row.request, token.shown)) for slot, token in zip(row.slots, row.tokens, strict=True))
        stills.append(_still(run, current, pool, crossed=_takes_a_block(current)))
    summary = _still(run, rows[-1], pool, crossed=True)
    return Frames([*stills, summary], [*map(_caption, rows), _summed_up(rows[-1])])


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {
        "bet": shared_blocks.bet(),
        "reveal": shared_blocks.reveal(),
        "holes": holes.holes(),
        "slot_16": frames().still(4),
        "copy_on_write": shared_blocks.copy_on_write(),
    }


def _takes_a_block(row: Row) -> bool:
    return len(row.positions) == 1 and row.positions[0] % BLOCK_SIZE == 0


def _caption(row: Row) -> str:
    position, slot = row.positions[-1], row.slots[-1]
    table = ", ".join(map(str, row.block_table))
    if len(row.positions) > 1:
        return f"The prompt's {len(row.positions)} tokens take {len(row.block_table)} blocks: the table is {table}."
    entry, offset = divmod(position, BLOCK_SIZE)
    block_id = row.block_table[entry]
    if _takes_a_block(row):
        taken = f"slot {(row.block_table[entry - 1] + 1) * BLOCK_SIZE} is taken"
        return f"Position {position}: {taken}, so entry {entry} of the table becomes block {block_id}: slot {slot}."
    return f"Position {position}: entry {entry} of the table is block {block_id}, offset {offset}: slot {slot}."


def _summed_up(row: Row) -> str:
    table = ", ".join(map(str, row.block_table))
    return f"In all: {row.seq_len} tokens in blocks {table}. Only the last block has empty slots."


def _still(run: Followed, row: Row, pool: dict[int, tuple[str, str]], crossed: bool) -> str:
    shapes = [
        text(LEFT, 24, "the request sees", colour=QUIET),
        text(LEFT, POOL_Y - 24, "the pool holds", colour=QUIET),
        *(rect(x - 19, POOL_Y - 35, 13, 13, tint(colour, 0.45)) for x, colour, _ in KEYS),
        *(text(x, POOL_Y - 24, words, colour=QUIET) for x, _, words in KEYS),
        *(_logical(run, row, index) for index in range(len(row.block_table))),
        *(_physical(number, row, pool) for number in range(1, BLOCKS + 1)),
        *(_crossed(row) if crossed else []),
    ]
    return svg(WIDTH, HEIGHT, *shapes, label="Blocks of the followed request, its block table, and the pool")


def _logical(run: Followed, row: Row, index: int) -> str:
    """Draw one logical block and, below it, its entry in the block table."""
    size = BLOCK_SIZE
    tokens = [token.shown for token in run.request.tokens[: row.seq_len]][index * size : (index + 1) * size]
    x, fresh = _x(index), row.positions[-1] // size == index or len(row.positions) > 1
    fills = [_fill(NAME, index * size + offset in row.positions) for offset in range(size)]
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


def _physical(number: int, row: Row, pool: dict[int, tuple[str, str]]) -> str:
    """Draw one block of the pool; only the followed request's tokens are written out."""
    first, (x, y) = number * BLOCK_SIZE, _corner(number)
    held = [pool.get(first + offset) for offset in range(BLOCK_SIZE)]
    slots = [None if owned is None else owned[1] if owned[0] == NAME else " " for owned in held]
    fills = [BLANK if owned is None else _fill(owned[0], first + i in row.slots) for i, owned in enumerate(held)]
    name = f"block {number}: slots {first} to {first + BLOCK_SIZE - 1}"
    stroke = BLUE if number in row.block_table else BORDER
    return block(x, y, slots, width=SLOT, height=TALL, fill=fills, name=name, stroke=stroke)


def _crossed(row: Row) -> list[str]:
    """Cross out the way from the third block's last slot to the next one in memory, which is
    taken.
    """
    number = row.block_table[2]
    (x, y), (end, _) = _corner(number), _corner(number + 1)
    start, end, top, low = x + 3.5 * SLOT, end + 0.5 * SLOT, y + TALL + 2, y + TALL + 14
    middle = (start + end) / 2
    return [
        line((start, top), (start, low), VERMILLION),
        line((start, low), (end, low), VERMILLION),
        arrow((end, low), (end, top), VERMILLION),
        line((middle - 6, low - 6), (middle + 6, low + 6), VERMILLION, width=3),
        line((middle - 6, low + 6), (middle + 6, low - 6), VERMILLION, width=3),
        text(end + 12, low + 2, f"slot {(number + 1) * BLOCK_SIZE} is taken", size=12, colour=VERMILLION_INK),
    ]


def _corner(number: int) -> tuple[float, float]:
    row, column = divmod(number - 1, COLUMNS)
    return _x(column), POOL_Y + row * ROW_GAP


def _fill(name: str, now: bool) -> str:
    """Return a strong colour for a slot that this step writes and a pale one for the others."""
    return COLOURS[name] if now else tint(COLOURS[name], 0.35)


def _x(column: int) -> float:
    return LEFT + column * (BLOCK_SIZE * SLOT + GAP)
