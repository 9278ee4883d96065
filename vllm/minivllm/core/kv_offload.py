"""The books of a second tier of the KV cache: which blocks lie in host memory, and which of them go first.

The tier is a second block pool, keyed by the same hashes as the first one. Nobody's table points into it: a block is
copied there when it is full, and copied back into a block of the first pool when a request's prefix is found there but
not here. So it extends the prefix cache, and a request that was preempted profits like any other.

A copy takes time, so each comes as a pair, and between its two calls the blocks are pinned:

    prepare_store ──▶ copy ──▶ complete_store      in between the key is HIT_PENDING, and its block is not evicted
    prepare_load  ──▶ copy ──▶ complete_load       in between the key stays a HIT, and its block is not evicted

Two rules say who is evicted. *LRU*: the key that was not touched for longest; all keys of a request are touched
together, its last block first, so the tail of a prefix goes before its head, without which it is of no use. *ARC*
keeps two such orders, T1 of keys stored once and T2 of those that were asked for again, and remembers what it has
evicted from either (B1, B2): a key that comes back and is remembered says which of the two was too small.

In vLLM v0.33.0: `vllm/v1/kv_offload/base.py` (`OffloadingManager`), `vllm/v1/kv_offload/cpu/manager.py`
(`CPUOffloadingManager`), `vllm/v1/kv_offload/cpu/policies/` (`LRUCachePolicy`, `ARCCachePolicy`); the second
`BlockPool` is as in `vllm/v1/simple_kv_offload/manager.py`. ARC: Megiddo and Modha, FAST 2003. No torch.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, BlockPoolError, KVCacheBlock

Evictable = Callable[[BlockHash], bool]


class LookupResult(Enum):
    """What the tier knows of a key: nothing; it can be loaded; it is being stored."""

    MISS = 0
    HIT = 1
    HIT_PENDING = 2


class PrepareStoreOutput(NamedTuple):
    """What a store is to copy: these keys, into these blocks of the tier; `evicted` keys and the blocks they had."""

    keys_to_store: list[BlockHash]
    block_ids: list[int]
    evicted: list[tuple[BlockHash, int]]


class CachePolicy(ABC):
    """The order in which keys are evicted. It knows those that can be loaded, and none that is being stored."""

    @abstractmethod
    def insert(self, keys: Sequence[BlockHash]) -> None:
        """Takes in keys of one request that were stored, in the order of its blocks."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Takes note that a request with these keys, in the order of its blocks, has come; it may know only some."""

    @abstractmethod
    def evict(self, count: int, evictable: Evictable) -> list[BlockHash]:
        """Removes and returns up to `count` keys, the next to go first. Those that are not evictable stay."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets all keys."""


class LRUCachePolicy(CachePolicy):
    """The key that was not touched for longest goes first; of a request's keys, the last one."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, keys: Sequence[BlockHash]) -> None:
        """See `CachePolicy`."""
        for key in reversed(keys):
            self._order[key] = None

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """See `CachePolicy`."""
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def evict(self, count: int, evictable: Evictable) -> list[BlockHash]:
        """See `CachePolicy`."""
        return _take(self._order, count, evictable)

    def clear(self) -> None:
        """See `CachePolicy`."""
        self._order.clear()


class ARCCachePolicy(CachePolicy):
    """T1 has keys stored once, T2 those touched since; B1 and B2 are the last keys evicted from either.

    `target_t1_size` is what T1 should have: it grows where a key of B1 comes back, by |B2| / |B1| or 1, and shrinks
    where one of B2 does; once for a request, however many of its keys are remembered. A key that comes back is stored
    into T1, as in vLLM; in the paper, into T2.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: the most keys that can be loaded at a time; as many are remembered in B1 and in B2."""
        self.capacity, self.target_t1_size = capacity, 0.0
        self.t1: OrderedDict[BlockHash, None] = OrderedDict()
        self.t2: OrderedDict[BlockHash, None] = OrderedDict()
        self.b1: OrderedDict[BlockHash, None] = OrderedDict()
        self.b2: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, keys: Sequence[BlockHash]) -> None:
        """See `CachePolicy`."""
        for key in reversed(keys):
            self.b1.pop(key, None)
            self.b2.pop(key, None)
            self.t1[key] = None

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """See `CachePolicy`."""
        self._adapt(keys)
        for key in reversed(keys):
            if key in self.t1:
                del self.t1[key]
                self.t2[key] = None
            for known in (self.t2, self.b1, self.b2):
                if key in known:
                    known.move_to_end(key)

    def _adapt(self, keys: Sequence[BlockHash]) -> None:
        if any(key in self.b1 for key in keys):
            self.target_t1_size = min(self.capacity, self.target_t1_size + max(1.0, len(self.b2) / len(self.b1)))
        if any(key in self.b2 for key in keys):
            self.target_t1_size = max(0.0, self.target_t1_size - max(1.0, len(self.b1) / len(self.b2)))

    def evict(self, count: int, evictable: Evictable) -> list[BlockHash]:
        """See `CachePolicy`."""
        evicted: list[BlockHash] = []
        while len(evicted) < count:
            pairs = [(self.t1, self.b1), (self.t2, self.b2)]
            if len(self.t1) < int(self.target_t1_size):
                pairs.reverse()
            for known, remembered in pairs:
                if taken := _take(known, 1, evictable):
                    remembered[taken[0]] = None
                    evicted += taken
                    break
            else:
                break
        for remembered in (self.b1, self.b2):
            while len(remembered) > self.capacity:
                remembered.popitem(last=False)
        return evicted

    def clear(self) -> None:
        """See `CachePolicy`."""
        for known in (self.t1, self.t2, self.b1, self.b2):
            known.clear()
        self.target_t1_size = 0.0


def _take(order: "OrderedDict[BlockHash, None]", count: int, evictable: Evictable) -> list[BlockHash]:
    """Removes the first `count` evictable keys."""
    taken: list[BlockHash] = []
    for key in order:
        if len(taken) == count:
            break
        if evictable(key):
            taken.append(key)
    for key in taken:
        del order[key]
    return taken


EVICTION_POLICIES = ("lru", "arc")


class CPUOffloadingManager:
    """A second block pool, of `num_blocks` usable blocks with ids from 1 on, and the order in which they are evicted.

    Each key is there once. Raises `BlockPoolError` for calls that are not paired.
    """

    def __init__(self, num_blocks: int, eviction_policy: str = "lru") -> None:
        self.block_pool = BlockPool(num_blocks + 1)
        self.policy: CachePolicy = ARCCachePolicy(num_blocks) if eviction_policy == "arc" else LRUCachePolicy()
        self._pending: dict[BlockHash, KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the tier."""
        return self.block_pool.num_usable_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that can be loaded."""
        return len(self.block_pool.cached_block_hash_to_block)

    @property
    def num_pending_blocks(self) -> int:
        """Blocks that are being stored."""
        return len(self._pending)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are being stored or loaded, or were promised to a request."""
        return self.num_blocks - self.block_pool.get_num_free_blocks()

    def lookup(self, key: BlockHash) -> LookupResult:
        """Says whether a key is there; changes nothing."""
        if self.block_pool.get_cached_block(key) is not None:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._pending else LookupResult.MISS

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Takes note that a request with these keys has come, or has ended: they are evicted later than others."""
        self.policy.touch(keys)

    def prepare_load(self, keys: Iterable[BlockHash]) -> list[int]:
        """Pins the blocks of these keys, all of them hits, and returns their ids. Several loads may overlap."""
        blocks = self._blocks_of(keys)
        self.block_pool.touch(blocks)
        return [block.block_id for block in blocks]

    def complete_load(self, keys: Iterable[BlockHash]) -> None:
        """Ends one `prepare_load` of these keys."""
        self.block_pool.free_blocks(self._blocks_of(keys))

    def prepare_store(self, keys: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """Takes a block for each of a request's keys that is not there, as far as there are any; others are left out.

        None: not one can be had, since all are pinned.
        """
        keys = list(dict.fromkeys(keys))
        known = {key for key in keys if self.lookup(key) is not LookupResult.MISS}
        missing = [key for key in keys if key not in known]
        taken, evicted = self._take_blocks(len(missing), known)
        if missing and not taken:
            return None
        to_store = missing[: len(taken)]
        self._pending.update(zip(to_store, taken, strict=True))
        return PrepareStoreOutput(to_store, [block.block_id for block in taken], evicted)

    def complete_store(self, keys: Sequence[BlockHash], success: bool = True) -> None:
        """Ends a store: from now on these keys are hits, or, without success, not there."""
        blocks = [self._pending.pop(key) for key in keys]
        if success:
            self.block_pool.cache_full_blocks(blocks, keys, 0, len(keys))
            self.policy.insert(keys)
        self.block_pool.free_blocks(blocks)

    def reset(self) -> bool:
        """Forgets all keys. Does nothing and returns False while a block is pinned."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.policy.clear()
        return True

    def _blocks_of(self, keys: Iterable[BlockHash]) -> list[KVCacheBlock]:
        blocks = [(key, self.block_pool.get_cached_block(key)) for key in keys]
        for key, block in blocks:
            if block is None:
                raise BlockPoolError(f"key {key.hex()} is not in host memory")
        return [block for _, block in blocks if block is not None]

    def _take_blocks(
        self, count: int, protected: set[BlockHash]
    ) -> tuple[list[KVCacheBlock], list[tuple[BlockHash, int]]]:
        """Up to `count` blocks: those that hold nothing, at the head of the free queue, then evicted ones."""
        num_blank = self.num_blocks - self.num_used_blocks - self.num_pending_blocks
        blank = self.block_pool.get_new_blocks(min(count, num_blank))
        victims = self.policy.evict(count - len(blank), lambda key: key not in protected and self._is_free(key))
        blocks = self._blocks_of(victims)
        evicted = [(key, block.block_id) for key, block in zip(victims, blocks, strict=True)]
        self.block_pool.touch(blocks)
        self.block_pool.evict_blocks(blocks)
        return [*blank, *blocks], evicted

    def _is_free(self, key: BlockHash) -> bool:
        block = self.block_pool.get_cached_block(key)
        return block is not None and block.ref_cnt == 0
