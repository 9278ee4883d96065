"""Bookkeeping for a second tier of the KV cache: which blocks are in host memory, and which of them
are evicted first.

The tier is a second block pool, keyed by the same hashes as the first one. No block table points
into it: a block is copied there when it is full, and copied back into a block of the first pool
when a request's prefix is found there but not here. So it extends the prefix cache, and a request
that was preempted profits like any other.

A copy takes time, so each one is a pair of calls, and its blocks are pinned between the two:

    prepare_store ──▶ copy ──▶ complete_store      in between the key is HIT_PENDING, and its block is not evicted
    prepare_load  ──▶ copy ──▶ complete_load       in between the key stays a HIT, and its block is not evicted

The pool's own free queue says which key is evicted: the least recently used one. All keys of a
request are touched together, its last block first, so a prefix loses its tail before its head,
without which it is of no use.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/manager.py`, whose second `BlockPool` this is;
`vllm/v1/kv_offload/cpu/manager.py` (`CPUOffloadingManager`), which can also evict by ARC
(`vllm/v1/kv_offload/cpu/policies/`) and have further tiers below (`vllm/v1/kv_offload/tiering/`).
No torch.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import BlockPool, BlockPoolError, KVCacheBlock


class LookupResult(Enum):
    """The state of a key in the tier: not there, ready to be loaded, or still being stored."""

    MISS = 0
    HIT = 1
    HIT_PENDING = 2


class PrepareStoreOutput(NamedTuple):
    """The keys that a store is to copy, and the blocks of the tier that receive them."""

    keys_to_store: list[BlockHash]
    block_ids: list[int]


class CPUOffloadingManager:
    """A second block pool, with `num_blocks` usable blocks, numbered from 1. It holds each key at
    most once.

    Calls that are not paired raise `BlockPoolError`.
    """

    def __init__(self, num_blocks: int) -> None:
        # One more for the null block, which every pool has.
        self.block_pool = BlockPool(num_blocks + 1)
        self._pending: dict[BlockHash, KVCacheBlock] = {}

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the tier."""
        return self.block_pool.num_usable_blocks

    @property
    def num_used_blocks(self) -> int:
        """Return the number of blocks that can be loaded."""
        return len(self.block_pool.cached_block_hash_to_block)

    @property
    def num_pending_blocks(self) -> int:
        """Return the number of blocks that are being stored."""
        return len(self._pending)

    def lookup(self, key: BlockHash) -> LookupResult:
        """Return whether a key is there, without any side effect."""
        if self.block_pool.get_cached_block(key) is not None:
            return LookupResult.HIT
        return LookupResult.HIT_PENDING if key in self._pending else LookupResult.MISS

    def touch(self, keys: Sequence[BlockHash]) -> None:
        """Mark these keys as just used, because a request with them has arrived or ended; they are
        evicted later than others.
        """
        # Holding a block and letting it go puts it at the end of the free queue: so it counts as
        # used just now.
        hits = [key for key in keys if self.lookup(key) is LookupResult.HIT]
        self.prepare_load(hits)
        self.complete_load(hits)

    def prepare_load(self, keys: Iterable[BlockHash]) -> list[int]:
        """Pin the blocks of these keys, which must all be hits, and return their ids. Several loads
        may overlap.
        """
        blocks = self._blocks_of(keys)
        self.block_pool.touch(blocks)
        return [block.block_id for block in blocks]

    def complete_load(self, keys: Iterable[BlockHash]) -> None:
        """Unpin the blocks of one `prepare_load`, and mark its keys as just used."""
        self.block_pool.free_blocks(reversed(self._blocks_of(keys)))

    def prepare_store(self, keys: Iterable[BlockHash]) -> PrepareStoreOutput | None:
        """Allocate a block for each missing key of a request, as far as blocks are available; leave
        out the other keys.

        Keys that are there already stay, and count as just used, as in vLLM's
        `CPUOffloadingManager`: the block of an offered key was just read, or is about to leave the
        cache. Return None if not a single block is available because all are pinned.
        """
        results = {key: self.lookup(key) for key in keys}
        missing = [key for key, result in results.items() if result is LookupResult.MISS]
        hits = [key for key, result in results.items() if result is LookupResult.HIT]
        self.prepare_load(hits)  # so that they are not evicted for the others
        blocks = self.block_pool.get_new_blocks(min(len(missing), self.block_pool.get_num_free_blocks()))
        self.complete_load(hits)
        if missing and not blocks:
            return None
        to_store = missing[: len(blocks)]
        self._pending.update(zip(to_store, blocks, strict=True))
        return PrepareStoreOutput(to_store, [block.block_id for block in blocks])

    def complete_store(self, keys: Sequence[BlockHash]) -> None:
        """Finish a store: from now on its keys are hits."""
        blocks = [self._pending.pop(key) for key in keys]
        self.block_pool.cache_full_blocks(blocks, keys, 0, len(keys))
        self.block_pool.free_blocks(reversed(blocks))

    def reset(self) -> bool:
        """Forget all keys. Do nothing and return False while a block is pinned."""
        return self.block_pool.reset_prefix_cache()

    def _blocks_of(self, keys: Iterable[BlockHash]) -> list[KVCacheBlock]:
        blocks = [(key, self.block_pool.get_cached_block(key)) for key in keys]
        for key, block in blocks:
            if block is None:
                raise BlockPoolError(f"key {key.hex()} is not in host memory")
        return [block for _, block in blocks if block is not None]
