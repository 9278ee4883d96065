"""Lesson 05's prefix cache: the sessions served for every number of users and every pool of a map.

The engine's own scheduler and block pool serve them, under a virtual clock; a step's time is that of Llama-3.1-8B on an
H100, modelled. All else is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

from minivllm.config.checks import require
from minivllm.core.block_hash import HashBlockTokens
from minivllm_lab.bounded import bounded
from minivllm_lab.optimization_catalog.prefix_reuse import BLOCK_SIZE, Load, Reuse, reuse
from minivllm_lab.optimization_catalog.sharing import Sharing, sharing
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from widgets.shell.spec import require_numbers

MODEL, GPU = "Llama-3.1-8B", "H100"
USERS = (2, 3, 4, 6, 8, 12, 16)
POOLS = tuple(1024 * size for size in (2, 3, 4, 6, 8, 12, 16, 24))
"""Tokens. Both axes go up by half an octave, now a little more, now a little less: cells are of one size."""
TURNS, PREFIXES, TARGETS = (1, 2, 3, 4), (128, 256, 512, 1024), (10, 15, 20, 30)
ORDERS = ("in turn", "at random")
MOST = {"turns": 4, "prefix": 1024, "target": 1e3}
AT_ONCE = 0.012
"""Seconds of CPU after which the map as far as it is known is drawn."""


PATIENCE = 2.0
"""Of CPU, for one cell with the reader's names."""


@dataclass(frozen=True)
class State:
    """Where the reader stands, and the cells of the map that are known by now."""

    load: Load
    pool: int
    """Tokens that the pool holds."""
    target: float
    """Seconds to the first token that 95 % of the requests after each user's first must keep to."""
    cells: Mapping[tuple[int, int], Reuse]
    """By users and pool; all are there once the sweep has ended."""
    endless: Reuse | None
    """The same sessions on a pool that never evicts; None until it is known."""

    @property
    def kind(self) -> Sharing:
        """Who shares what."""
        return self.load.kind

    @property
    def users(self) -> int:
        """Sessions."""
        return self.load.users

    @property
    def here(self) -> Reuse:
        """The cell where the reader stands."""
        return self.cells[self.users, self.pool]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens found in the cache, rightly or wrongly."""
        return self.here.hit_rate

    @property
    def findable(self) -> int:
        """Prompt tokens that a cache without end finds."""
        return sum(self.load.findable())

    @property
    def endless_rate(self) -> float:
        """The share of the prompt tokens that a cache without end finds."""
        return self.findable / sum(self.here.prompts)

    @property
    def lost(self) -> int:
        """Prompt tokens that a cache without end finds, and this one does not."""
        pairs = zip(self.load.findable(), self.here.found, strict=True)
        return sum(max(0, could - found) for could, found in pairs)

    @property
    def wrong_rate(self) -> float:
        """Share of the prompt tokens found in a block of another text."""
        return sum(self.here.wrong) / sum(self.here.prompts)

    @property
    def kept(self) -> int:
        """Tokens that must stay cached for everyone's last turn."""
        return self.load.kind.kept(self.users, self.load.turns, self.load.prefix)

    def ttft(self, cell: Reuse) -> float:
        """The time to first token, in seconds, that the target is held against."""
        return cell.later_ttft(self.load.turns)

    def missed(self, cell: Reuse) -> bool:
        """Whether the target is missed."""
        return self.ttft(cell) > self.target

    def row(self) -> list[tuple[int, Reuse]]:
        """(pool, what became of the prompts) for the present number of users, as far as it is known."""
        return [(pool, self.cells[self.users, pool]) for pool in POOLS if (self.users, pool) in self.cells]


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
    """Serve the sessions, first for these users and this pool, then for all others of the map.

    Args:
        kind: who shares what, of `minivllm_lab.optimization_catalog.sharing`.
        users: sessions, one of `USERS`.
        turns: requests of each session.
        prefix: tokens of the shared beginning.
        order: how users come back, of `ORDERS`.
        pool: tokens that the KV cache holds, one of `POOLS`.
        target: milliseconds to the first token, for 95 % of the requests after each user's first.
        hash_block_tokens: the reader's, in place of the engine's.

    Raises:
        MinivllmError: a value makes no sense, or the reader's names are no bytes or never come.
    """
    require_numbers(MOST, turns=turns, prefix=prefix, target=target)
    require(users in USERS, f"users is one of {', '.join(map(str, USERS))}, not {users!r}")
    require(pool in POOLS, f"pool is one of {', '.join(map(str, POOLS))} tokens, not {pool!r}")
    require(order in ORDERS, f"order is one of {', '.join(ORDERS)}, not {order!r}")
    require(target > 0, f"target is above 0 ms, not {target!r}")
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
    """All cells, those in the reader's row first; None is the pool that never evicts."""
    at = USERS.index(users), POOLS.index(pool)
    cells = [(abs(row - at[0]), abs(column - at[1]), USERS[row], POOLS[column]) for row, column in _places()]
    return [(users, None), *((many, size) for _, _, many, size in sorted(cells))]


def _places() -> list[tuple[int, int]]:
    return [(row, column) for row in range(len(USERS)) for column in range(len(POOLS))]


class _Map:
    """The cells of one load, computed once each; pools that evict nothing have one result."""

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
    """The map of a load, filled while it is looked at; `own` are the reader's names."""
    return {}


@lru_cache(maxsize=1024)
def _ample_blocks(kind: Sharing, users: int, turns: int, prefix: int) -> int:
    return Load(kind, users, turns, prefix).ample_blocks


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model(MODEL), get_hardware(GPU))


def told(value: float, bound: float, scale: float, unit: str) -> str:
    """`value`, with as many digits as it takes to be on its own side of `bound`."""
    digits = 1
    while digits < 9 and _side(round(value * scale, digits), bound * scale) != _side(value, bound):
        digits += 1
    return f"{value * scale:,.{digits}f} {unit}"


def _side(value: float, bound: float) -> int:
    return (value > bound) - (value < bound)


def milliseconds(value: float, bound: float) -> str:
    """A time in seconds, told in milliseconds; never "at most `bound`" if it is more."""
    return told(value, bound, 1e3, "ms")
