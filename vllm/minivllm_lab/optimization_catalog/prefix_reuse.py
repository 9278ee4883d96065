"""Run sessions on the engine's own scheduler and block pool; count prefix-cache hits, evictions and
wrong hits.

The scheduler and the pool also record which requests each step admits, and which blocks it evicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.config.checks import require
from minivllm.core.block_hash import BlockHash, HashBlockTokens, hash_block_tokens
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm_lab.optimization_catalog.sharing import Sharing, sessions
from minivllm_simulate.cost_model import Cost
from minivllm_simulate.virtual_clock import percentile, simulate

BLOCK_SIZE = 16
CONFIG = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=8192)
SHARED = -1
"""Stands in place of a user for the prefix that all users share."""


class Admission(NamedTuple):
    """A step that admitted requests, and the steps after it that admitted none."""

    requests: tuple[int, ...]
    """Indices in the workload."""
    lost: tuple[tuple[int, int], ...]
    """(user, blocks of that user's context that were evicted in these steps); `SHARED` stands
    for all users.
    """


class Reuse(NamedTuple):
    """The outcome of all sessions, with requests in the order of `sessions`."""

    prompts: tuple[int, ...]
    """Prompt tokens of each request."""
    found: tuple[int, ...]
    """Prompt tokens of each request that were in the cache."""
    wrong: tuple[int, ...]
    """Prompt tokens of each request that were found in a block of another text."""
    ttfts: tuple[float, ...]
    """Time to first token of each request, in seconds."""
    evicted: int
    """Blocks that were evicted."""
    admissions: tuple[Admission, ...]

    @property
    def hit_rate(self) -> float:
        """Return the share of the prompt tokens found in the cache."""
        return sum(self.found) / sum(self.prompts)

    def later_ttft(self, turns: int, share: float = 0.95) -> float:
        """Return a quantile of the time to first token, in seconds, over all but each user's first
        request.
        """
        return percentile([ttft for index, ttft in enumerate(self.ttfts) if index % turns or turns == 1], share)


@dataclass(frozen=True)
class Load:
    """Sessions to serve, described by the arguments of `sessions`, and the function that hashes
    their blocks (None: the engine's).
    """

    kind: Sharing
    users: int
    turns: int
    prefix: int
    at_random: bool = False
    hash_block_tokens: HashBlockTokens | None = None

    def findable(self) -> list[int]:
        """Return, for each request, the prompt tokens that an unlimited cache would hold."""
        return self.kind.findable(self.users, self.turns, self.prefix, BLOCK_SIZE)

    def context_blocks(self, turn: int) -> int:
        """Return the number of full blocks in this turn's prompt that the user's later turns
        repeat.
        """
        kind = self.kind
        if kind.prefix_of == "request":
            return 0
        return (self.prefix + kind.grows * (turn * (kind.question + kind.answer) + kind.question)) // BLOCK_SIZE

    @property
    def shared_blocks(self) -> int:
        """Return the number of full blocks in the prefix that all users share."""
        return self.prefix // BLOCK_SIZE if self.kind.prefix_of == "all" else 0

    @property
    def ample_blocks(self) -> int:
        """Return the size of a pool that never evicts: the blocks of all requests minus their hits."""
        lengths = [self.kind.prompt_tokens(turn, self.prefix) + self.kind.answer for turn in range(self.turns)]
        hits = sum(self.findable()) // BLOCK_SIZE
        return self.users * sum(-(-length // BLOCK_SIZE) for length in lengths) - hits


def reuse(load: Load, num_blocks: int, cost: Cost) -> Reuse:
    """Serve the sessions on a pool of `num_blocks` usable blocks of `BLOCK_SIZE` tokens.

    Raises:
        MinivllmError: the pool cannot hold a single request, or a block's hash is not bytes.
    """
    work = sessions(load.kind, load.users, load.turns, load.prefix, at_random=load.at_random)
    watched = _WatchedScheduler(load, CacheConfig(num_gpu_blocks=1 + num_blocks))
    run = simulate(work, watched, cost)
    return Reuse(
        tuple(request.prompt_tokens for request in work),
        tuple(request.num_cached_tokens for request in run.requests),
        tuple(watched.wrong.get(index, 0) for index in range(len(work))),
        tuple(request.ttft for request in run.requests),
        *watched.evictions(),
    )


class _WatchedPool(BlockPool):
    """The engine's pool, which also records evicted blocks."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        super().__init__(num_gpu_blocks, enable_caching)
        self.evicted: list[int] = []

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        self._note(self.free_block_queue.first(num_blocks))
        return super().get_new_blocks(num_blocks)

    def evict_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(blocks)
        self._note(blocks)
        super().evict_blocks(blocks)

    def _note(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.evicted += [block.block_id for block in blocks if block.block_hash is not None]


class _WatchedScheduler(Scheduler):
    """The engine's scheduler, which also records whose context each block holds."""

    def __init__(self, load: Load, cache: CacheConfig) -> None:
        naming = _named(load.hash_block_tokens) if load.hash_block_tokens else _remembered
        policy = SchedulingPolicy(block_pool=_WatchedPool, hash_block_tokens=naming)
        super().__init__(CONFIG, cache, policy)
        self.load = load
        self.evicted = 0
        self.wrong: dict[int, int] = {}
        """By admitted request: tokens found in blocks of another text."""
        self._owners: dict[int, int] = {}
        self._admitted: list[tuple[list[int], Counter[int]]] = []

    def schedule(self) -> SchedulerOutput:
        """Decide a step as the engine does, and record what it admitted and evicted."""
        self._note_evictions()  # by steps that needed no decision
        output = super().schedule()
        indices = [int(new.req_id) for new in output.scheduled_new_reqs]
        new = [index for index in indices if index not in self.wrong]
        if new:
            self._admitted.append((new, Counter()))
        self._note_evictions()
        for index, data in zip(indices, output.scheduled_new_reqs, strict=True):
            self._note_blocks(index, data.block_ids)
        return output

    def evictions(self) -> tuple[int, tuple[Admission, ...]]:
        """Return how many blocks were evicted, and all steps that admitted requests."""
        self._note_evictions()
        return self.evicted, tuple(Admission(tuple(new), tuple(sorted(lost.items()))) for new, lost in self._admitted)

    def _note_evictions(self) -> None:
        pool = self.kv_cache_manager.block_pool
        assert isinstance(pool, _WatchedPool)
        self.evicted += len(pool.evicted)
        if self._admitted:
            users = (self._owners.pop(block_id, None) for block_id in pool.evicted)
            self._admitted[-1][1].update(user for user in users if user is not None)
        pool.evicted.clear()

    def _note_blocks(self, index: int, block_ids: Sequence[int]) -> None:
        """Record the blocks of an admitted request as its user's context."""
        load = self.load
        user, turn = divmod(index, load.turns)
        shared, context = load.shared_blocks, load.context_blocks(turn)
        for owner, ids in ((SHARED, block_ids[:shared]), (user, block_ids[shared:context])):
            self._owners.update(dict.fromkeys(ids, owner))
        self.wrong.setdefault(index, self._wrong_tokens(self.requests[str(index)], block_ids))

    def _wrong_tokens(self, request: Request, block_ids: Sequence[int]) -> int:
        if self.load.hash_block_tokens is None:
            return 0
        blocks = self.kv_cache_manager.block_pool.blocks
        hits = (blocks[block_id].block_hash for block_id in block_ids[: request.num_cached_tokens // BLOCK_SIZE])
        pairs = zip(request.block_hashes, hits, strict=False)
        return BLOCK_SIZE * sum(_true(expected) != _true(actual) for expected, actual in pairs)


class _ReadersHash(bytes):
    """A block's hash by the reader's function; `true` is the engine's hash of the same block."""

    true: BlockHash


def _true(block_hash: BlockHash | None) -> BlockHash | None:
    return getattr(block_hash, "true", block_hash)


@lru_cache(maxsize=4)
def _named(own: HashBlockTokens) -> HashBlockTokens:
    """Wrap the reader's hash function: call it once per block, and keep the engine's hash beside
    its result.
    """
    known: dict[BlockHash, _ReadersHash] = {}

    def hash_by_reader(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
        true = hash_block_tokens(getattr(parent, "true", parent), token_ids, extra_keys)
        if true not in known:
            result = own(bytes(parent), list(token_ids), extra_keys)
            require(isinstance(result, bytes), f"hash_block_tokens gave {result!r}; a block's hash is bytes")
            known[true] = _ReadersHash(result)
            known[true].true = true
        return known[true]

    return hash_by_reader


@lru_cache(maxsize=2**15)
def _hashed(parent: BlockHash, token_ids: tuple[int, ...], extra_keys: bytes) -> BlockHash:
    return hash_block_tokens(parent, token_ids, extra_keys)


def _remembered(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
    """Hash as the engine does, but from a cache, since the same blocks recur for every pool size."""
    return _hashed(parent, tuple(token_ids), extra_keys)
