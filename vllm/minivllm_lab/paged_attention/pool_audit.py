"""Compare a block pool's reference counts with the tables that hold its blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minivllm_lab.block_tables import Pool


class HeldTable(NamedTuple):
    """One sample's block table at one moment; requests and samples are counted from 1."""

    request: int
    sample: int
    blocks: tuple[int, ...]
    tokens: int


class Fault(NamedTuple):
    """One disagreement between the pool and the tables."""

    words: str
    blocks: tuple[int, ...] = ()
    clash: bool = False
    """Two sequences write into the block: wrong answers, not just lost memory."""


def audit(pool: Pool, tables: Sequence[HeldTable], prompts: dict[int, int], block_size: int) -> list[Fault]:
    """Return the disagreements between the pool and the tables, gravest first; empty if the pool is
    right.

    Args:
        pool: the pool.
        tables: all tables that hold blocks.
        prompts: prompt tokens by request; the tokens after them are each sample's own.
        block_size: token slots in a block.
    """
    holders = Counter(block for table in tables for block in table.blocks)
    return [*_clashes(tables, prompts, block_size), *_miscounted(pool, holders)]


def _clashes(tables: Sequence[HeldTable], prompts: dict[int, int], block_size: int) -> list[Fault]:
    """Find blocks that hold two parts of a text, or that two samples of a request both write into."""
    places: dict[int, set[tuple[int, int]]] = {}
    writers: dict[int, set[tuple[int, int]]] = {}
    for table in tables:
        prompt = prompts[table.request]
        for entry, block in enumerate(table.blocks):
            places.setdefault(block, set()).add((table.request, entry))
            if table.tokens > prompt and (entry + 1) * block_size > prompt:
                writers.setdefault(block, set()).add((table.request, table.sample))
    faults = [Fault("block 0, the null block, was handed out", (0,), True)] if 0 in places else []
    for block, entries in sorted(places.items()):
        requests = {request for request, _ in entries}
        if len(requests) > 1:
            faults.append(Fault(f"block {block} went to {named(requests)}", (block,), True))
        elif len(entries) > 1:
            faults.append(Fault(f"block {block} went to request {min(requests)} twice", (block,), True))
        elif len(writers.get(block, ())) > 1:
            words = f"{len(writers[block])} samples of request {min(requests)} write into block {block}"
            faults.append(Fault(words, (block,), True))
    return faults


def _miscounted(pool: Pool, holders: Counter[int]) -> list[Fault]:
    """Find wrong reference counts and a wrong number of free blocks."""
    counts = {block.block_id: block.ref_cnt for block in pool.blocks[1:]}
    lost = tuple(block for block, count in counts.items() if count > 0 and not holders[block])
    faults = [Fault(f"{counted_blocks(len(lost))} lost: counted as held, but in no table", lost)] if lost else []
    for block, count in counts.items():
        if count != holders[block] and block not in lost:
            faults.append(Fault(f"block {block} is held {holders[block]} times, but counted {count} times", (block,)))
    free, real = pool.get_num_free_blocks(), sum(not holders[block] for block in counts)
    if free != real:
        faults.append(Fault(f"the pool reports that {free} blocks are free, but {real} are in no table"))
    return faults


def named(numbers: Iterable[int]) -> str:
    """Name requests for a sentence, as in "request 3" or "requests 1, 2 and 4"."""
    *first, last = sorted(set(numbers))
    return f"requests {', '.join(map(str, first))} and {last}" if first else f"request {last}"


def counted_blocks(count: int) -> str:
    """Format a number of blocks for a sentence, as in "1 block" or "2 blocks"."""
    return f"{count} block{'' if count == 1 else 's'}"
