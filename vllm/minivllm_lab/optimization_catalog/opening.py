"""Lesson 05's opening figure: a prefix-cache hit on the followed request's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm_lab.optimization_catalog import captured, manuals
from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, block, paragraph, rect, svg, text, tint
from minivllm_lab.pictures.followed import BLOCK_SIZE, NAME, Token, followed, tokenizer, tokens_of
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, VERMILLION

WIDTH, HEIGHT = 700, 366
SLOT, TALL, GAP, LEFT = 40, 28, 9, 16
FIRST_Y, POOL_Y, SECOND_Y = 52, 168, 312
OTHER, STRANGER = "print", "sub"
COLOURS = {NAME: BLUE, OTHER: ORANGE, STRANGER: GREEN}
STRANGERS_PROMPT = "def sub(a, b):\n    return"


def paper_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash on paper, as the lesson does: (7 × the parent's hash + the tokens, weighted 1, 2, 3,
    4) mod 1000.
    """
    return (7 * parent + sum(weight * token for weight, token in enumerate(token_ids, start=1))) % 1000


class Prompt(NamedTuple):
    """A request's prompt cut into blocks, and the hashes of the full ones."""

    request: str
    blocks: tuple[tuple[Token, ...], ...]
    hashes: tuple[int, ...]

    @classmethod
    def of(cls, request: str, tokens: Sequence[Token]) -> Prompt:
        """Cut a prompt into blocks and hash the full ones."""
        blocks = tuple(tuple(tokens[start : start + BLOCK_SIZE]) for start in range(0, len(tokens), BLOCK_SIZE))
        hashes: list[int] = []
        for tokens_of_block in blocks:
            if len(tokens_of_block) == BLOCK_SIZE:
                ids = [token.id for token in tokens_of_block]
                hashes.append(paper_hash(hashes[-1] if hashes else 0, ids))
        return cls(request, blocks, tuple(hashes))


def frames() -> Frames:
    """Draw the hashes, the pool, a miss and a hit; the hit is also the summary."""
    run = followed("prefix hit")
    first, second = (Prompt.of(name, run.requests[name].prompt) for name in (NAME, OTHER))
    stranger = Prompt.of(STRANGER, tokens_of(tokenizer().encode(STRANGERS_PROMPT).ids))
    table = next(row for step in run.steps for row in step.rows if row.request == OTHER).block_table
    first_hash, second_hash = first.hashes
    shots = [
        (_still(first, 0), "A prompt of nine tokens is cut into blocks of four. The third block is not full."),
        (
            _still(first, 2),
            f"Each full block gets a hash of its tokens and of the hash before it: {first_hash}, then {second_hash}.",
        ),
        (
            _still(first, 2, pool=[1, 2, 3], cached=first.hashes),
            f"The nine tokens fill blocks 1 to 3. Hashes {first_hash} and {second_hash} now lead to two of them.",
        ),
        (
            _still(first, 2, pool=[1, 2, 3], cached=first.hashes, other=stranger),
            f"After another beginning, the same four tokens have the hash {stranger.hashes[1]}: a miss.",
        ),
        (
            _still(first, 2, pool=[1, 2, 3], cached=first.hashes, other=second),
            "A second prompt begins in the same way, so its full blocks have the same hashes.",
        ),
        (
            _still(first, 2, pool=[1, 2, 3, 4], cached=first.hashes, other=second, hit=True),
            f"Both hashes are found: the block table is {', '.join(map(str, table))}; one token of nine is computed.",
        ),
    ]
    return Frames(*zip(*shots, strict=True))


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {"bet": manuals.bet(), "reveal": manuals.reveal(), "graph": captured.picture()}


def _still(
    first: Prompt, shown: int, *, pool: Sequence[int] = (), cached: Sequence[int] = (), other: Prompt | None = None,
    hit: bool = False,
) -> str:  # fmt: skip
    """Draw the first `shown` hashes of the first prompt, the pool's blocks, and another prompt that
    looks its hashes up.
    """
    shapes = [text(LEFT, FIRST_Y - 28, "the first request's prompt", colour=QUIET), *_prompt(first, FIRST_Y)]
    for index in range(shown):
        shapes.append(_hash(_x(index), FIRST_Y + TALL + 8, first.hashes[index], BLUE))
        if index:
            level = FIRST_Y + TALL + 19
            shapes.append(arrow((_x(index - 1) + 76, level), (_x(index) - 4, level), BLUE))
    if pool:
        shapes += _pool(first, pool, cached, other if hit else None)
        shapes += [
            arrow((_x(index) + 2 * SLOT, FIRST_Y + TALL + 4), (_x(index) + 2 * SLOT, POOL_Y - 22), BLUE)
            for index in range(3)
        ]
    if other is not None:
        shapes += _looks(other, cached, hit)
    return svg(WIDTH, HEIGHT, *shapes, label="Blocks of a prompt, their hashes, and the pool of blocks")


def _prompt(prompt: Prompt, y: float) -> list[str]:
    """Draw a prompt's blocks side by side."""
    shapes = []
    for index, tokens in enumerate(prompt.blocks):
        slots = [token.shown for token in tokens] + [None] * (BLOCK_SIZE - len(tokens))
        fill = tint(COLOURS[prompt.request], 0.35)
        shapes.append(block(_x(index), y, slots, width=SLOT, height=TALL, fill=fill, stroke=QUIET))
    return shapes


def _hash(x: float, y: float, block_hash: int, colour: str) -> str:
    return rect(x, y, 72, 22, tint(colour, 0.15), stroke=colour, radius=11, size=12, label=f"hash {block_hash}")


def _pool(first: Prompt, pool: Sequence[int], cached: Sequence[int], other: Prompt | None) -> list[str]:
    """Draw the blocks of the pool that hold tokens, each with its hash if it has one."""
    shapes = [text(LEFT, POOL_Y - 28, "the pool", colour=QUIET)]
    for index, number in enumerate(pool):
        owner = first if index < 3 else other
        tokens = first.blocks[index] if index < 3 else other.blocks[-1] if other else ()
        slots = [token.shown for token in tokens] + [None] * (BLOCK_SIZE - len(tokens))
        colour = COLOURS[owner.request] if owner else BLANK
        shared = other is not None and index < len(cached)
        label = f"block {number}" + (", two requests" if shared else "")
        shapes.append(
            block(_x(index), POOL_Y, slots, width=SLOT, height=TALL, fill=tint(colour, 0.35), name=label, stroke=colour)
        )
        if index < len(cached):
            shapes.append(_hash(_x(index), POOL_Y + TALL + 6, cached[index], BLUE))
    return shapes


def _looks(other: Prompt, cached: Sequence[int], hit: bool) -> list[str]:
    """Draw another prompt below the pool, with the hashes that it looks up and their hits."""
    colour = COLOURS[other.request]
    shapes = _prompt(other, SECOND_Y)
    for index, block_hash in enumerate(other.hashes):
        known = block_hash in cached
        shapes.append(_hash(_x(index), SECOND_Y - 28, block_hash, colour if known else VERMILLION))
        if hit and known:
            shapes.append(arrow((_x(index) + 36, SECOND_Y - 32), (_x(index) + 36, POOL_Y + TALL + 32), colour))
        elif not known:
            shapes.append(text(_x(index) + 80, SECOND_Y - 12, "not known", size=12, colour=VERMILLION))
    if hit:
        shapes.append(arrow((_x(2) + 24, SECOND_Y - 4), (_x(3) + 24, POOL_Y + TALL + 6), colour))
    words = {OTHER: "another request's prompt", STRANGER: "a prompt that begins in another way"}[other.request]
    shapes.append(paragraph(_x(3), SECOND_Y + 12, words, WIDTH - _x(3) - LEFT, colour=QUIET))
    return shapes


def _x(column: int) -> float:
    return LEFT + column * (BLOCK_SIZE * SLOT + GAP)
