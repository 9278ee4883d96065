"""Draw lesson 11's opening: the followed request is preempted when another one needs a block, and
later resumes.

It shows what the engine did in the scene "small pool", which has six blocks and two requests that
need more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, rect, svg, text, tint
from minivllm_lab.pictures.followed import NAME, Followed, Step, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE
from minivllm_lab.preemption import cliff

WIDTH, HEIGHT = 700, 330
LEFT, CELL, TALL, BLOCK = 76, 40, 30, 102
OTHER = "class"
COLOURS = {NAME: BLUE, OTHER: ORANGE}


def frames() -> Frames:
    """Draw six stills: a full pool, the victim, blocks that change owners, the return, and what was
    recomputed.
    """
    run = followed("small pool")
    gone = next(index for index, step in enumerate(run.steps) if NAME in step.waiting)
    back = next(index for index in range(gone, len(run.steps)) if run.steps[index].row())
    before, without, resumed = run.steps[gone - 1], run.steps[gone], run.steps[back]
    lost, again = _row(before).seq_len, _row(resumed).num_computed_tokens
    taken = without.row(OTHER)
    assert taken is not None
    block, new = taken.block_table[-1], _row(resumed).num_scheduled_tokens
    known = len(run.request.prompt) + sum(step.row() is not None for step in run.steps[1:gone])
    last = run.steps[-1]
    stills = [
        _still(run, "Two requests, and a pool that is full", before, known, lost),
        _still(run, f"{OTHER} needs one more block", before, known, lost, wants=True),
        _still(run, f"{NAME} is preempted: its blocks are free, its tokens stay", without, known, 0, freed=True),
        _still(run, f"{OTHER} goes on, {NAME} waits", run.steps[back - 1], known, 0),
        _still(run, f"{OTHER} has ended: {NAME} comes back", resumed, known, again, computes=new),
        _still(run, "And goes on as if nothing had happened", last, len(run.request.tokens), _row(last).seq_len),
    ]
    captions = [
        f"{OTHER} was admitted first, {NAME} last. Each holds three of six blocks.",
        f"{OTHER} needs a block, and none is free. {NAME} was admitted last, so it gives its own back.",
        f"{NAME} had {lost} computed tokens, now 0. Block {block} is {OTHER}'s; the others keep their hashes.",
        f"{OTHER} generates its last token. {NAME} waits at the head; its client sees a pause.",
        f"{NAME} finds {again // run.block_size} blocks again, so only {new} tokens are computed, like a chunk.",
        f"The same answer as without the pause. Its price: {lost - again} tokens were computed twice.",
    ]
    return Frames(stills, captions)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": cliff.bet(), "reveal": cliff.reveal()}


def _row(step: Step):
    row = step.row()
    assert row is not None
    return row


def _owners(step: Step) -> dict[int, str]:
    return {block: row.request for row in step.rows for block in row.block_table}


def _pool(run: Followed, step: Step, wants: bool, freed: bool) -> list[str]:
    owners, names = _owners(step), step.cached_blocks
    parts = [text(LEFT - 12, 104, "the pool", anchor="end")]
    for place in range(1, run.num_blocks):
        x = LEFT + (place - 1) * BLOCK
        owner = owners.get(place)
        fill = tint(COLOURS[owner], 0.55) if owner else BLANK
        parts.append(rect(x, 80, BLOCK - 8, 40, fill, stroke=None if owner else QUIET, dash=None if owner else "3 3",
                          label=owner or "free", mono=True))  # fmt: skip
        for y, shown in ((136, f"block {place}"), (151, f"hash {names[place][:4]}" if place in names else "")):
            parts.append(text(x + BLOCK / 2 - 4, y, shown, anchor="middle", size=11, colour=QUIET))
    if wants:
        x = LEFT + 5 * BLOCK + BLOCK / 2 - 4
        parts += [arrow((x, 60), (x, 76), ORANGE), text(x - 8, 66, f"{OTHER} needs a block", anchor="end", size=12)]
    if freed:
        parts.append(
            text(LEFT, 66, f"a hash stays until the block is taken; {NAME} holds no block", size=12, colour=QUIET)
        )
    return parts


def _still(
    run: Followed, title: str, step: Step, known: int, computed: int, *, wants: bool = False, freed: bool = False,
    computes: int = 0,
) -> str:  # fmt: skip
    request, cells = run.request, []
    for place, token in enumerate(request.tokens[:known]):
        if place < computed:
            fill = tint(BLUE, 0.55)
        else:
            fill = tint(GREEN, 0.45) if place < computed + computes else BLANK
        cells.append(rect(LEFT + place * CELL, 200, CELL - 3, TALL, fill, label=token.shown, mono=True, size=11))
    note = f"{computed} computed" + (f", {computes} in this step" if computes else "") + f", {known} known"
    parts = [
        text(20, 32, title, size=15, bold=True),
        *_pool(run, step, wants, freed),
        text(LEFT - 12, 220, NAME, anchor="end", mono=True),
        *cells,
        text(LEFT, 248, note, size=12, colour=QUIET),
        *_key(_legend(computes)),
    ]
    return svg(WIDTH, HEIGHT, *parts, label=title)


def _legend(computes: int) -> Mapping[str, str]:
    named = {"computed": tint(BLUE, 0.55), "known, not computed": BLANK}
    return {**named, "computed in this step": tint(GREEN, 0.45)} if computes else named


def _key(legend: Mapping[str, str]) -> Sequence[str]:
    parts, x = [], float(LEFT)
    for name, fill in legend.items():
        parts += [rect(x, 280, 16, 16, fill, stroke=QUIET), text(x + 22, 293, name, size=12)]
        x += 190
    return parts
