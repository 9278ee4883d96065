"""Serve lesson 05's sessions for every number of users and every pool in a map.

The engine's own scheduler and block pool serve the sessions, on a virtual clock. The time of a step
is modelled, for Llama-3.1-8B on an H100; everything else is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from minivllm.core.block_hash import HashBlockTokens
from minivllm_lab.checks.bounded import bounded
from minivllm_lab.optimization_catalog.prefix_reuse import BLOCK_SIZE, Load, Reuse, reuse
from minivllm_lab.optimization_catalog.sharing import Sharing, sharing
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

MODEL, GPU = "Llama-3.1-8B", "H100"
USERS = (2, 3, 4, 6, 8, 12, 16)
POOLS = tuple(1024 * size for size in (2, 3, 4, 6, 8, 12, 16, 24))
"""Tokens of each pool. Both axes grow by about half an octave per step, so that cells are
equally large.
"""
TURNS = (1, 2, 3, 4)
PREFIXES = (128, 256, 512, 1024)
TARGETS = (10, 15, 20, 30)
ORDERS = ("in turn", "at random")
AT_ONCE = 0.012
"""CPU seconds after which the known part of the map is drawn."""

PATIENCE = 2.0
"""CPU seconds that the reader's hash function may take for one cell."""


@dataclass(frozen=True)
class State:
    """The reader's setting, and the cells of the map that are known so far."""

    load: Load
    pool: int
    """Tokens in the pool."""
    target: float
    """The limit of the p95 time to first token, for the requests after each user's first."""
    cells: Mapping[tuple[int, int], Reuse]
    """Results by users and pool; complete once the sweep has ended."""
    endless: Reuse | None
    """The result of a pool that never evicts; None until it is known."""

    @property
    def kind(self) -> Sharing:
        """Return the kind of sharing among the sessions."""
        return self.load.kind

    @property
    def users(self) -> int:
        return self.load.users

    @property
    def here(self) -> Reuse:
        """Return the cell at the reader's setting."""
        return self.cells[self.users, self.pool]

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens that hit the cache, rightly or wrongly."""
        return self.here.hit_rate

    @property
    def findable(self) -> int:
        """Return the number of prompt tokens that hit a cache that never evicts."""
        return sum(self.load.findable())

    @property
    def endless_rate(self) -> float:
        """Return the share of the prompt tokens that hit a cache that never evicts."""
        return self.findable / sum(self.here.prompts)

    @property
    def lost(self) -> int:
        """Return the number of prompt tokens that hit only in a cache that never evicts."""
        pairs = zip(self.load.findable(), self.here.found, strict=True)
        return sum(max(0, possible - hits) for possible, hits in pairs)

    @property
    def wrong_rate(self) -> float:
        """Return the share of the prompt tokens that hit a block with other text."""
        return sum(self.here.wrong) / sum(self.here.prompts)

    @property
    def kept(self) -> int:
        """Return the number of tokens that must stay cached until every user's last turn."""
        return self.load.kind.kept(self.users, self.load.turns, self.load.prefix)

    def ttft(self, cell: Reuse) -> float:
        """Return the time to first token, in seconds, to compare with the limit."""
        return cell.later_ttft(self.load.turns)

    def missed(self, cell: Reuse) -> bool:
        """Return whether the cell misses the limit."""
        return self.ttft(cell) > self.target


def sweep(
    kind: str = "documents",
    users: int = 8,
    turns: int = 3,
    prefix: int = 1024,
    order: str = "in turn",
    pool: int = 6144,
    target: float = 15,
    hash_block_tokens: HashBlockTokens | None = None,
) -> Iterator[State]:
    """Serve the sessions, first for these users and this pool, then for the rest of the map.

    Args:
        kind: Who shares what; see `minivllm_lab.optimization_catalog.sharing`.
        users: Sessions, one of `USERS`.
        turns: Requests of each session.
        prefix: Tokens in the shared prefix.
        order: How users return, one of `ORDERS`.
        pool: Tokens in the KV cache, one of `POOLS`.
        target: Milliseconds to the first token, for 95 % of the requests after each user's first.
        hash_block_tokens: The reader's hash function, in place of the engine's.

    Raises:
        MinivllmError: The reader's function returns no bytes or never ends.
    """
    load = Load(sharing(kind), users, turns, prefix, order == "at random", hash_block_tokens)
    return _states(load, pool, target / 1e3)


def _states(load: Load, pool: int, target: float) -> Iterator[State]:
    known = _Map(load)
    known.cell(load.users, pool)
    start = 0.0
    for users, size in _by_distance(load.users, pool):
        if known.has(users, size):
            continue
        if time.process_time() - start > AT_ONCE:
            yield State(load, pool, target, known.cells(), known.endless_if_known(load.users))
            start = time.process_time()
        known.cell(users, size)
    yield State(load, pool, target, known.cells(), known.endless_if_known(load.users))


def _by_distance(users: int, pool: int) -> list[tuple[int, int | None]]:
    """List all cells, those in the reader's row first; None stands for a pool that never evicts."""
    at = USERS.index(users), POOLS.index(pool)
    places = product(enumerate(USERS), enumerate(POOLS))
    cells = [(abs(row - at[0]), abs(column - at[1]), many, size) for (row, many), (column, size) in places]
    return [(users, None), *((many, size) for _, _, many, size in sorted(cells))]


class _Map:
    """The cells of one load, each computed once; all pools that evict nothing share one result."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.runs = _runs(load.kind, load.turns, load.prefix, load.at_random, load.hash_block_tokens)

    def has(self, users: int, pool: int | None) -> bool:
        return self._key(users, pool) in self.runs

    def cell(self, users: int, pool: int | None) -> Reuse:
        key = self._key(users, pool)
        if key not in self.runs:
            naming = self.load.hash_block_tokens if pool else None
            with bounded(PATIENCE, "your hash_block_tokens") if naming else nullcontext():
                self.runs[key] = reuse(self._of(users, naming), key[1], _cost())
        return self.runs[key]

    def cells(self) -> dict[tuple[int, int], Reuse]:
        keys = {(users, pool): self._key(users, pool) for users in USERS for pool in POOLS}
        return {place: self.runs[key] for place, key in keys.items() if key in self.runs}

    def endless_if_known(self, users: int) -> Reuse | None:
        return self.runs.get(self._key(users, None))

    def _key(self, users: int, pool: int | None) -> tuple[int, int, bool]:
        own = pool is not None and self.load.hash_block_tokens is not None
        ample = _ample_blocks(self.load.kind, users, self.load.turns, self.load.prefix)
        blocks = ample if pool is None else pool // BLOCK_SIZE
        return users, blocks if own else min(blocks, ample), own

    def _of(self, users: int, naming: HashBlockTokens | None) -> Load:
        load = self.load
        return Load(load.kind, users, load.turns, load.prefix, load.at_random, naming)


@lru_cache(maxsize=12)
def _runs(
    kind: Sharing, turns: int, prefix: int, at_random: bool, own: HashBlockTokens | None
) -> dict[tuple[int, int, bool], Reuse]:
    """Return the results of a load, for the caller to fill in; `own` is the reader's hash function."""
    return {}


@lru_cache(maxsize=1024)
def _ample_blocks(kind: Sharing, users: int, turns: int, prefix: int) -> int:
    return Load(kind, users, turns, prefix).ample_blocks


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model(MODEL), get_hardware(GPU))


def told(value: float, bound: float, scale: float, unit: str) -> str:
    """Format `value` with enough digits to show on which side of `bound` it is."""
    digits = 1
    while digits < 9 and _side(round(value * scale, digits), bound * scale) != _side(value, bound):
        digits += 1
    return f"{value * scale:,.{digits}f} {unit}"


def _side(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)


def milliseconds(value: float, bound: float) -> str:
    """Format seconds in milliseconds, and never show a value above `bound` as at most `bound`."""
    return told(value, bound, 1e3, "ms")
