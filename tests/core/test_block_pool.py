"""Compare the pool with a plain record of each block's holders, and its free queue with a list."""

from collections import Counter

import pytest
from core.invariants import check_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.core.block_pool import BlockPool, BlockPoolError, FreeKVCacheBlockQueue, KVCacheBlock


class PoolAgainstAccount(RuleBasedStateMachine):
    """A pool compared with a plain record. Holders are block tables, as in requests; hashes are
    small numbers, so that several blocks share one.
    """

    @initialize(num_gpu_blocks=st.integers(2, 9))
    def make(self, num_gpu_blocks: int) -> None:
        self.pool = BlockPool(num_gpu_blocks)
        self.tables: list[list[KVCacheBlock]] = []
        self.published: list[tuple[bytes, KVCacheBlock]] = []

    def forget(self, blocks: list[KVCacheBlock]) -> None:
        self.published = [(block_hash, block) for block_hash, block in self.published if block not in blocks]

    @rule(hashes=st.lists(st.none() | st.integers(0, 2).map(lambda number: bytes([number])), max_size=9))
    def get_new_blocks(self, hashes: list[bytes | None]) -> None:
        count = len(hashes)
        free = self.pool.free_block_queue.first(self.pool.free_block_queue.num_free_blocks)
        if count > len(free):
            with pytest.raises(BlockPoolError):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        assert blocks == free[:count]
        assert all(block.block_hash is None and block.ref_cnt == 1 for block in blocks)
        self.forget(blocks)
        self.tables.append(blocks)
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block_hash is not None:
                self.pool.cache_full_blocks([block], [block_hash], 0, 1)
                self.published.append((block_hash, block))

    @rule(block_hash=st.integers(0, 2).map(lambda number: bytes([number])))
    def hit(self, block_hash: bytes) -> None:
        actual = self.pool.get_cached_block(block_hash)
        expected = next((block for known, block in self.published if known == block_hash), None)
        assert actual is expected, "the block published first among those still there"
        if actual is not None:
            self.pool.touch([actual])
            self.tables.append([actual])

    @rule(data=st.data(), block_hash=st.integers(0, 2).map(lambda number: bytes([number])))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        if not (held := [block for table in self.tables for block in table]):
            return
        block = data.draw(st.sampled_from(held))
        if block.block_hash is not None:
            with pytest.raises(BlockPoolError):
                self.pool.cache_full_blocks([block], [block_hash], 0, 1)
            return
        self.pool.cache_full_blocks([block], [block_hash], 0, 1)
        self.published.append((block_hash, block))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        before = self.pool.free_block_queue.first(self.pool.free_block_queue.num_free_blocks)
        self.pool.free_blocks(reversed(table))
        last_held = [block for block in reversed(table) if block.ref_cnt == 0]
        front = [block for block in last_held if block.block_hash is None]
        back = [block for block in last_held if block.block_hash is not None]
        assert self.pool.free_block_queue.first(self.pool.free_block_queue.num_free_blocks) == front + before + back

    @rule(data=st.data())
    def double_free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.pool.blocks[1:]))
        if block.ref_cnt == 0:
            with pytest.raises(BlockPoolError, match=rf"\b{block.block_id}\b"):
                self.pool.free_blocks([block])

    @rule()
    def touch_and_free_null_block(self) -> None:
        self.pool.touch([self.pool.null_block])
        self.pool.free_blocks([self.pool.null_block])

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.pool.blocks[1:]), max_size=2))
        self.pool.evict_blocks(blocks)
        self.forget(blocks)

    @rule()
    def reset_prefix_cache(self) -> None:
        anything_held = any(self.tables)
        assert self.pool.reset_prefix_cache() is not anything_held
        if not anything_held:
            self.published = []

    @invariant()
    def books_agree(self) -> None:
        holders = Counter(block.block_id for table in self.tables for block in table)
        check_pool(self.pool, holders)
        assert {id(block) for _, block in self.published} == {
            id(block) for block in self.pool.blocks if block.block_hash is not None
        }
        assert self.pool.get_usage() == pytest.approx(len(holders) / self.pool.num_usable_blocks)


TestPoolAgainstAccount = PoolAgainstAccount.TestCase
TestPoolAgainstAccount.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_the_queue_refuses_what_would_break_it() -> None:
    blocks = [KVCacheBlock(block_id) for block_id in range(3)]
    queue = FreeKVCacheBlockQueue(blocks[:2])
    for call, argument in ((queue.popleft_n, 3), (queue.remove, blocks[2]), (queue.append_n, [blocks[0]])):
        with pytest.raises(BlockPoolError, match="free"):
            call(argument)
        assert queue.first(9) == blocks[:2]
        assert queue.num_free_blocks == 2


def test_removal_from_the_middle_takes_no_longer_in_a_long_queue() -> None:
    def links_read(size: int) -> int:
        blocks = [CountingBlock(block_id) for block_id in range(size)]
        queue = FreeKVCacheBlockQueue(blocks)
        CountingBlock.reads = 0
        queue.remove(blocks[size // 2])
        return CountingBlock.reads

    assert links_read(1000) == links_read(10)


class CountingBlock(KVCacheBlock):
    reads = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("prev_free_block", "next_free_block"):
            CountingBlock.reads += 1
        return super().__getattribute__(name)
