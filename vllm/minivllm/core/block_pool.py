"""The pool of KV-cache blocks: reference counts, the free queue, and the prefix cache's map from
hashes to blocks.

All bookkeeping is on the host. A block is `block_size` token slots in every layer's cache tensor;
its id is its index.

In vLLM v0.33.0: `vllm/v1/core/block_pool.py` (`BlockPool`, `BlockHashToBlockMap`) and
`vllm/v1/core/kv_cache_utils.py` (`KVCacheBlock`, `FreeKVCacheBlockQueue`).
"""

from collections.abc import Iterable, Sequence

from minivllm.core.block_hash import BlockHash
from minivllm.errors import MinivllmError


class BlockPoolError(MinivllmError):
    """A call that would corrupt the pool, such as freeing a block twice or taking more blocks than
    are free.
    """


class KVCacheBlock:
    """One block. All blocks are created together with the pool, never on the hot path.

    `ref_cnt` counts the requests that hold the block. At zero it is in the free queue, where it may
    keep its `block_hash` and so can still be found. The hash is set only while the block is full
    and published.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int, is_null: bool = False) -> None:
        self.block_id = block_id
        self.is_null = is_null
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    def __repr__(self) -> str:
        cached = "cached" if self.block_hash else "not cached"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, {cached})"


class FreeKVCacheBlockQueue:
    """The free blocks, in the order in which they will be reused, from the head.

    A doubly linked list threaded through the blocks themselves, with a sentinel block at either
    end. A prefix hit takes a block out of the *middle*: O(1) here, O(n) in a deque. Every operation
    is O(1) per block.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        # Sentinels at both ends: no operation has to ask whether a block is the first or the last.
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        _link(self._head, self._tail)
        self.append_n(blocks)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take `n` blocks from the head, head first. Raise `BlockPoolError`, taking none, if
        fewer are free.
        """
        if n > self.num_free_blocks:
            raise BlockPoolError(f"cannot take {n} blocks: {self.num_free_blocks} are free")
        # Unlink `n` blocks in one pass and join the rest of the list once.
        taken: list[KVCacheBlock] = []
        block = self._head.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        _link(self._head, block)
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Remove one block from anywhere in the queue. Raise `BlockPoolError` if it is not in
        the queue.
        """
        if block.prev_free_block is None or block.next_free_block is None:
            raise BlockPoolError(f"{block} is not in the free queue")
        _link(block.prev_free_block, block.next_free_block)
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the tail, in the given order; the last one becomes the tail."""
        self._insert_between(self._tail.prev_free_block, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks at the head as one group, in the given order; the first one becomes the
        head.
        """
        self._insert_between(self._head, blocks, self._head.next_free_block)

    def first(self, n: int) -> list[KVCacheBlock]:
        """Return up to `n` blocks from the head, which stay where they are."""
        blocks: list[KVCacheBlock] = []
        block = self._head.next_free_block
        while block is not None and block is not self._tail and len(blocks) < n:
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def _insert_between(
        self, before: KVCacheBlock | None, blocks: Sequence[KVCacheBlock], after: KVCacheBlock | None
    ) -> None:
        assert before is not None
        for block in blocks:
            # A block in the list would be linked twice, and the list would fall apart later.
            if block.prev_free_block is not None:
                raise BlockPoolError(f"{block} is already in the free queue")
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        _link(before, after)
        self.num_free_blocks += len(blocks)


def _link(left: KVCacheBlock | None, right: KVCacheBlock | None) -> None:
    assert left is not None
    assert right is not None
    left.next_free_block = right
    right.prev_free_block = left


class BlockHashToBlockMap:
    """A map from each hash to the blocks that have it, in the order in which they were published.

    Several blocks may hold the same tokens: two requests can each fill one before either can find
    the other's. They are not merged, because that would change a block table that the device
    already has.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, dict[int, KVCacheBlock]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def get_one_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Return the block published first among those still published, or None."""
        blocks = self._blocks.get(block_hash)
        # Dictionaries keep their order, so the first is the one published first.
        return next(iter(blocks.values())) if blocks else None

    def insert(self, block_hash: BlockHash, block: KVCacheBlock) -> None:
        """Publish a block under its hash."""
        self._blocks.setdefault(block_hash, {})[block.block_id] = block

    def pop(self, block_hash: BlockHash, block_id: int) -> None:
        """Remove one block; others with the same hash can still be found."""
        blocks = self._blocks[block_hash]
        del blocks[block_id]
        if not blocks:
            del self._blocks[block_hash]


class BlockPool:
    """All blocks of one KV cache. Block 0 is the null block: it pads tables and is never allocated
    or freed.

    The free queue doubles as the LRU list of cached blocks. Blocks without a hash are freed to its
    head, since reusing them loses nothing; blocks with a hash go to its tail, so that they stay
    findable as long as possible.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id, is_null=block_id == 0) for block_id in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block = BlockHashToBlockMap()

    @property
    def num_usable_blocks(self) -> int:
        """Return the number of blocks available to requests: all but the null block."""
        return self.num_gpu_blocks - 1

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that no request holds, including cached ones."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Return the fraction of the usable blocks that requests hold, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / self.num_usable_blocks

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        """Return the first block published under this hash, free or held, or None."""
        return self.cached_block_hash_to_block.get_one_block(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the head of the free queue; each loses its hash and gets a reference
        count of 1.

        Raise `BlockPoolError`, taking none, if fewer than `num_blocks` are free.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            self._withdraw_hash(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block; blocks in the free queue leave it but keep their hash."""
        for block in blocks:
            # A free block that still has its hash: take it out of the middle of the queue.
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop a reference to each block; pass them in the order in which they should be evicted (a
        block table reversed).

        Blocks whose count drops to zero join the free queue: those without a hash at its head, as
        one group whose first block is reused next; those with a hash at its tail. Raise
        `BlockPoolError` for a block that is already free.
        """
        # Two lists rather than two calls a block: those without a hash keep their order as one
        # group.
        without_hash: list[KVCacheBlock] = []
        with_hash: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                raise BlockPoolError(f"double free of block {block.block_id}: no request holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (without_hash if block.block_hash is None else with_hash).append(block)
        self.free_block_queue.prepend_n(without_hash)
        self.free_block_queue.append_n(with_hash)

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[BlockHash], num_cached: int, num_full: int
    ) -> None:
        """Publish `blocks[num_cached:num_full]` of one request's table under the hashes at the
        same positions.
        """
        for index in range(num_cached, num_full):
            block = blocks[index]
            block_hash = block_hashes[index]
            if block.block_hash is not None:
                raise BlockPoolError(f"block {block.block_id} is already published")
            block.block_hash = block_hash
            self.cached_block_hash_to_block.insert(block_hash, block)

    def evict_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove the hashes of blocks, so that they can no longer be found; reference counts do
        not change.
        """
        for block in blocks:
            self._withdraw_hash(block)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash. Do nothing and return False while any request holds a block."""
        if self.get_num_free_blocks() != self.num_usable_blocks:
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.block_hash = None
        return True

    def _withdraw_hash(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            self.cached_block_hash_to_block.pop(block.block_hash, block.block_id)
            block.block_hash = None
