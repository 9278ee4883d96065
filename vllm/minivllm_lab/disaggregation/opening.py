"""Lesson 08's opening: the followed request's prompt on one engine, its answer on another, and the
blocks between them.

The prefiller's blocks are on the left, the decoder's on the right; the top shows what the proxy
passes between them. Tokens and the prefiller's blocks are those of the recorded request; the
decoder's come from a pool in which others have left gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.core.block_pool import BlockPool
from minivllm_lab.disaggregation import split
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, RULE, arrow, block, rect, svg, text, text_width, tint
from minivllm_lab.pictures.followed import BLOCK_SIZE, Token, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, VERMILLION

WIDTH, HEIGHT = 700, 366
LEFT, RIGHT, PANEL, SLOT = 10, 366, 324, 58
TOP, ROW, STATE, LEGEND_Y = 142, 48, 300, 352
NEW, KEPT, CAME, HOLD = tint(ORANGE, 0.6), tint(BLUE, 0.3), tint(GREEN, 0.5), VERMILLION
BYTES_PER_TOKEN = 2048
"""Bytes a token of the embedded model in float32: 4 layers, keys and values, 2 heads of 32
numbers.
"""
LEASE = 30


def frames() -> Frames:
    """Draw six stills: the prompt is computed, held, requested, read, freed, answered."""
    run = followed()
    prompt, output = run.request.prompt, [token.shown for token in run.request.output]
    remote, mine = list(run.steps[0].row().block_table), _scattered(3)  # type: ignore[union-attr]
    full, count, moved = _slots(prompt), len(prompt), len(remote) * BLOCK_SIZE * BYTES_PER_TOKEN
    empty: list[list[str | None]] = [[None] * BLOCK_SIZE for _ in remote]
    params = f"remote_num_tokens: {count}, remote_block_ids: {remote}"
    stills = [
        _still(
            _proxy("the prompt, max_tokens: 1, do_remote_decode: true", to_left=True),
            _cache(LEFT, remote, full, NEW), _cache(RIGHT, mine, empty, KEPT, holds=False),
            _state(LEFT, "RUNNING", f"computes {count} tokens, samples {output[0]}"), _state(RIGHT, "", "nothing yet"),
        ),
        _still(
            _proxy(params, to_left=False), _cache(LEFT, remote, full, KEPT, held=True),
            _cache(RIGHT, mine, empty, KEPT, holds=False),
            _state(LEFT, "FINISHED", f"its blocks are held, for {LEASE} s at most"), _state(RIGHT, "", "nothing yet"),
        ),
        _still(
            _proxy(f"the prompt, do_remote_prefill: true, {params}", to_right=True),
            _cache(LEFT, remote, full, KEPT, held=True), _cache(RIGHT, mine, empty, KEPT),
            _state(LEFT, "FINISHED", "its blocks are held"),
            _state(RIGHT, "WAITING_FOR_REMOTE_KVS", f"0 tokens here, {count} remote: block table {mine}"),
        ),
        _still(
            _cache(LEFT, remote, full, KEPT, held=True), _cache(RIGHT, mine, full, CAME), _arrows(remote, mine),
            text(WIDTH / 2, 60, f"{moved:,} bytes", bold=True, anchor="middle"),
            _state(LEFT, "FINISHED", "its blocks are held"),
            _state(RIGHT, "WAITING_FOR_REMOTE_KVS", "not published yet; other requests run"),
        ),
        _still(
            _done(), _cache(LEFT, remote, full, BLANK, holds=False), _cache(RIGHT, mine, full, KEPT),
            _state(LEFT, "", "its blocks are free"),
            _state(RIGHT, "RUNNING", f"num_computed_tokens: {count} → {count - 1}; blocks published"),
        ),
        _still(
            _cache(LEFT, remote, empty, BLANK, holds=False), _cache(RIGHT, mine, full, KEPT, last=count - 1),
            _state(LEFT, "", "the next prompt's turn"),
            _state(RIGHT, "RUNNING", f"token {count} again, samples {output[0]}, then {' '.join(output[1:4])} …"),
        ),
    ]  # fmt: skip
    captions = [
        f"The prefiller computes {count} tokens, into blocks {_listed(remote)}, and samples one.",
        f"The request has ended, and its blocks stay, for {LEASE} s at most. The proxy learns where.",
        f"The decoder learns that {count} tokens can come. It takes blocks {_listed(mine)}, and waits.",
        f"It copies blocks: {_pairs(remote, mine)}. No request finds them before.",
        "The decoder is done, the prefiller frees. Keys have come, the last output has not.",
        f"The last token is computed again, gives {output[0]} as before, and the answer goes on.",
    ]
    return Frames(stills, captions)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": split.bet(), "reveal": split.reveal(), "roof": split.on_one_roof()}


def _scattered(count: int) -> list[int]:
    """Return blocks that a pool allocates after others have come and gone."""
    pool = BlockPool(8)
    taken = {block.block_id: block for block in pool.get_new_blocks(7)}
    for block_id in (7, 2, 5):
        pool.free_blocks([taken[block_id]])
    return [block.block_id for block in pool.get_new_blocks(count)]


def _slots(tokens: Sequence[Token]) -> list[list[str | None]]:
    shown: list[str | None] = [token.shown for token in tokens]
    shown += [None] * (-len(shown) % BLOCK_SIZE)
    return [shown[start : start + BLOCK_SIZE] for start in range(0, len(shown), BLOCK_SIZE)]


# ---- parts of a still ----------------------------------------------------------------------------


def _still(*parts: str) -> str:
    panels = [
        rect(x, 88, PANEL, 240, tint(INK, 0.04), stroke=RULE, stroke_width=1.5, radius=8)
        + text(x + 12, 112, name, size=14, bold=True)
        for x, name in ((LEFT, "the prefiller"), (RIGHT, "the decoder"))
    ]
    label = "A prefiller's blocks and a decoder's, and the proxy above them"
    return svg(WIDTH, HEIGHT, *panels, *parts, *_legend("".join(parts)), label=label)


def _legend(drawn: str) -> list[str]:
    """Explain the colours that a still has."""
    keys = (
        ("computed in this step", NEW),
        ("in the cache", KEPT),
        ("has just come", CAME),
        ("held for the decoder", ""),
    )
    x, parts = float(LEFT), []
    for words, fill in keys:
        if fill and f'fill="{fill}"' in drawn:
            parts.append(rect(x, LEGEND_Y - 11, 22, 14, fill, stroke=QUIET))
        elif not fill and HOLD in drawn:
            parts.append(rect(x, LEGEND_Y - 12, 22, 15, stroke=HOLD, stroke_width=2, dash="4 3", radius=4))
        else:
            continue
        parts.append(text(x + 30, LEGEND_Y, words, size=12))
        x += 54 + text_width(words, 12)
    return parts


def _cache(
    x: float, ids: Sequence[int], rows: Sequence[Sequence[str | None]], fill: str,
    *, holds: bool = True, held: bool = False, last: int | None = None,
) -> str:  # fmt: skip
    """Draw the blocks of one engine in the order of their ids; `rows` are in the order of the
    request's tokens.
    """
    shown = []
    for place, block_id in enumerate(sorted(ids)):
        index = ids.index(block_id)
        fills = [fill] * BLOCK_SIZE
        if last is not None and last // BLOCK_SIZE == index:
            fills[last % BLOCK_SIZE] = NEW
        y = TOP + place * ROW
        stroke = BORDER if holds else RULE
        shown.append(text(x + 14, y + 19, f"block {block_id}", size=12, colour=QUIET))
        shown.append(block(x + 74, y, rows[index], width=SLOT, fill=fills, stroke=stroke))
        if held:
            shown.append(
                rect(x + 70, y - 4, SLOT * BLOCK_SIZE + 8, 36, stroke=HOLD, stroke_width=2, dash="4 3", radius=5)
            )
    return "".join(shown)


def _state(x: float, status: str, words: str) -> str:
    y = STATE if status else STATE + 9
    first = text(x + 14, STATE, status, size=12, mono=True, bold=True) if status else ""
    return first + text(x + 14, y + 18 if status else y, words, size=12, colour=INK if status else QUIET)


def _proxy(words: str, *, to_left: bool | None = None, to_right: bool = False) -> str:
    """Draw the proxy's box with a message: to the prefiller, from it (`to_left` False), or to
    the decoder.
    """
    place = (LEFT, 26, WIDTH - 2 * LEFT, 34)
    box = rect(*place, "#FFFFFF", stroke="#3C4043", stroke_width=2, radius=6, label=words, size=12)
    name = text(LEFT, 20, "the proxy", size=12, colour=QUIET)
    x = (RIGHT if to_right else LEFT) + PANEL / 2
    ends = ((x, 60), (x, 86))
    return name + box + arrow(*(ends if to_left or to_right else ends[::-1]), INK, width=2)


def _row_y(ids: Sequence[int], block_id: int) -> float:
    return TOP + sorted(ids).index(block_id) * ROW + 14


def _arrows(remote: Sequence[int], mine: Sequence[int]) -> str:
    start, end = LEFT + 74 + SLOT * BLOCK_SIZE + 8, RIGHT + 8
    return "".join(
        arrow((start, _row_y(remote, a)), (end, _row_y(mine, b)), INK, width=2)
        for a, b in zip(remote, mine, strict=True)
    )


def _done() -> str:
    y = TOP + ROW + 14
    return arrow((RIGHT - 4, y), (LEFT + PANEL + 4, y), INK, width=2) + text(
        WIDTH / 2, 60, "done", bold=True, anchor="middle"
    )


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


def _pairs(remote: Sequence[int], mine: Sequence[int]) -> str:
    return ", ".join(f"{a} into {b}" for a, b in zip(remote, mine, strict=True))
