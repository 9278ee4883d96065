"""Is a block pool right? Its counts held against the tables of those who hold its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Block(Protocol):
    """A block of the pool."""

    block_id: int
    ref_cnt: int


class Pool(Protocol):
    """What a pool must be able to do: the engine's `BlockPool`, or the one of exercise 02."""

    blocks: Sequence[Any]

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        ...

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take blocks, all or none."""
        ...

    def touch(self, blocks: Iterable[Any]) -> None:
        """One holder more for each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One holder less for each block."""
        ...


@dataclass(frozen=True)
class HeldTable:
    """The block table of one sample at one moment."""

    request: int
    """From 1."""
    sample: int
    """From 1."""
    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Fault:
    """Where the pool's books and the tables disagree."""

    words: str
    blocks: tuple[int, ...] = ()
    clash: bool = False
    """Two write where one of them reads: wrong answers, not just lost memory."""


def audit(pool: Pool, tables: Sequence[HeldTable], prompts: dict[int, int], block_size: int) -> list[Fault]:
    """Where the pool's books and the tables disagree, the gravest first: nothing, if the pool is right.

    Args:
        pool: the pool.
        tables: all tables that hold blocks.
        prompts: prompt tokens by request: what is written behind them is each sample's own.
        block_size: token slots in a block.
    """
    holders = Counter(block for table in tables for block in table.blocks)
    return [*_clashes(tables, prompts, block_size), *_miscounted(pool, holders)]


def _clashes(tables: Sequence[HeldTable], prompts: dict[int, int], block_size: int) -> list[Fault]:
    """Blocks that stand for two places in the text, or that two samples of a request write into."""
    places: dict[int, set[tuple[int, int]]] = {}
    writers: dict[int, set[tuple[int, int]]] = {}
    for table in tables:
        prompt = prompts[table.request]
        for entry, block in enumerate(table.blocks):
            places.setdefault(block, set()).add((table.request, entry))
            if table.tokens > prompt and (entry + 1) * block_size > prompt:
                writers.setdefault(block, set()).add((table.request, table.sample))
    found = [Fault("block 0, the null block, was handed out", (0,), True)] if 0 in places else []
    for block, where in sorted(places.items()):
        who = {request for request, _ in where}
        if len(who) > 1:
            found.append(Fault(f"block {block} went to {named(who)}", (block,), True))
        elif len(where) > 1:
            found.append(Fault(f"block {block} went to request {min(who)} twice", (block,), True))
        elif len(writers.get(block, ())) > 1:
            words = f"{len(writers[block])} samples of request {min(who)} write into block {block}"
            found.append(Fault(words, (block,), True))
    return found


def _miscounted(pool: Pool, holders: Counter[int]) -> list[Fault]:
    """Counts that are not the numbers of holders, and free blocks that are not those in no table."""
    counts = {block.block_id: block.ref_cnt for block in pool.blocks[1:]}
    lost = tuple(block for block, count in counts.items() if count > 0 and not holders[block])
    found = [Fault(f"{counted_blocks(len(lost))} lost: counted as held, and in no table", lost)] if lost else []
    for block, count in counts.items():
        if count != holders[block] and block not in lost:
            found.append(Fault(f"block {block} is held {holders[block]} times, and {count} counted", (block,)))
    free, real = pool.get_num_free_blocks(), sum(not holders[block] for block in counts)
    if free != real:
        found.append(Fault(f"the pool says that {free} blocks are free, and {real} are in no table"))
    return found


def named(numbers: Iterable[int]) -> str:
    """Request 3; requests 1, 2 and 4."""
    *first, last = sorted(set(numbers))
    return f"requests {', '.join(map(str, first))} and {last}" if first else f"request {last}"


def counted_blocks(count: int) -> str:
    """1 block, 2 blocks."""
    return f"{count} block{'' if count == 1 else 's'}"
