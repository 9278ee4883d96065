"""Lesson 05's bet: ten customers ask in turn, and the cache has room for seven of their manuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, legend, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, ORANGE, VERMILLION

CUSTOMERS, ROUNDS, ROOM, BLOCK_SIZE = "ABCDEFGHIJ", 2, 7, 4
FOLLOWED = CUSTOMERS[0]
WIDTH, LEFT, TOP, CELL, TALL, GAP = 700, 92, 92, 29, 24, 12
LEGEND = ((f"{FOLLOWED}'s manual", ORANGE), ("another manual", tint(BLUE, 0.3)), ("empty, or not known yet", BLANK))


class Turn(NamedTuple):
    """A question: the customer, the cached manuals after it, and whether the customer's was found.

    The manuals are ordered by last use, so the last one is evicted first.
    """

    customer: str
    cached: list[str]
    found: bool


def turns() -> list[Turn]:
    """Let the customers ask the engine's scheduler, round after round.

    A manual is one block here. The pool has a block for each of `ROOM` manuals, one for the
    question, and the null block.
    """
    limits = SchedulerConfig(max_model_len=16, max_num_batched_tokens=16)
    scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=ROOM + 2, block_size=BLOCK_SIZE))
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    owners = {}
    answered = []
    for number, customer in enumerate(CUSTOMERS * ROUNDS):
        request = Request(str(number), [ord(customer)] * BLOCK_SIZE + [number], max_tokens=1)
        scheduler.add_request(request)
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({str(number): [1]}))
        owners[request.block_hashes[0]] = customer
        hashes = [block.block_hash for block in reversed(queue.first(ROOM + 1))]
        cached = [owners[block_hash] for block_hash in hashes if block_hash is not None]
        answered.append(Turn(customer, cached, request.num_cached_tokens > 0))
    return answered


def bet() -> str:
    """Draw the first questions, until the cache is full."""
    return _picture("Ten customers ask in turn, and there is room for seven manuals", turns()[:ROOM])


def reveal() -> str:
    """Draw every question of all rounds."""
    return _picture("Each question evicts a manual that is needed three questions later", turns())


def _picture(title: str, known: Sequence[Turn]) -> str:
    """Draw a column for each question: who asks, what is cached after it, what it evicted, and
    whether its own manual was found.
    """
    bottom, fills = TOP + ROOM * TALL, {FOLLOWED: LEGEND[0][1], "": LEGEND[2][1]}
    rows = (
        (TOP - 12, "asks"),
        (TOP + 16, "just used"),
        (bottom - 8, "next to go"),
        (bottom + 22, "evicted"),
        (bottom + 46, "found?"),
    )
    parts = [text(16, 28, title, size=15, bold=True)]
    parts += [text(LEFT - 10, y, words, size=12, colour=QUIET, anchor="end") for y, words in rows]
    for index, customer in enumerate(CUSTOMERS * ROUNDS):
        x = LEFT + index * CELL + index // len(CUSTOMERS) * GAP
        if index % len(CUSTOMERS) == 0:
            parts.append(text(x, TOP - 36, f"round {index // len(CUSTOMERS) + 1}", colour=QUIET))
        cached = known[index].cached if index < len(known) else []
        for place, name in enumerate([*cached, *[""] * (ROOM - len(cached))]):
            fill = fills.get(name, LEGEND[1][1])
            parts.append(rect(x, TOP + place * TALL, CELL, TALL, fill, stroke="#FFFFFF", label=name))
        evicted = set(known[index - 1].cached) - set(cached) if 0 < index < len(known) else set()
        words = ("yes" if known[index].found else "no") if index < len(known) else "?"
        middle = x + CELL / 2
        parts += [
            text(middle, TOP - 12, customer, anchor="middle", bold=True),
            text(middle, bottom + 22, "".join(evicted), anchor="middle", colour=VERMILLION),
            text(middle, bottom + 46, words, anchor="middle", size=12),
        ]
    parts += legend(LEFT, bottom + 66, 150, LEGEND, stroke=BORDER)
    return svg(WIDTH, bottom + 96, *parts, label=title)
