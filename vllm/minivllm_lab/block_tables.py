"""Block tables for lessons and simulations, on the engine's block pool or on a learner's; without
torch.

`BlockTable` is one sequence's table, with forks and copy-on-write; `Memory` has those of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.request import Request


class Pool(Protocol):
    """The methods of a block pool: the engine's `BlockPool`, lesson 02's, or a learner's."""

    @property
    def blocks(self) -> Sequence[Any]:
        """Return all blocks; block 0 is the null block."""
        ...

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that no table holds."""
        ...

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Allocate `num_blocks` blocks, or raise without allocating any."""
        ...

    def touch(self, blocks: Iterable[Any]) -> None:
        """Increment each block's reference count."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Decrement each block's reference count."""
        ...


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, pool: Pool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks: list[Any] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> list[tuple[int, int]]:
        """Allocate room for more tokens; return the (source, target) blocks to copy before
        writing.
        """
        blocks = list(self.pool.get_new_blocks(self.blocks_needed(num_tokens)))
        copies = []
        if self.must_copy(num_tokens):
            shared, own = self.blocks.pop(), blocks.pop(0)
            self.pool.free_blocks([shared])
            self.blocks.append(own)
            copies.append((shared.block_id, own.block_id))
        self.blocks += blocks
        self.num_tokens += num_tokens
        return copies

    def fork(self) -> BlockTable:
        """Return a second sequence with the same past, which shares every block."""
        child = BlockTable(self.pool, self.block_size)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        self.pool.touch(child.blocks)
        return child

    def free(self) -> None:
        """Release every block, the last one first."""
        blocks, self.blocks, self.num_tokens = self.blocks, [], 0
        self.pool.free_blocks(reversed(blocks))

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many blocks `append(num_tokens)` takes from the pool."""
        blocks = -(-(self.num_tokens + num_tokens) // self.block_size)
        return blocks - len(self.blocks) + self.must_copy(num_tokens)

    def must_copy(self, num_tokens: int) -> bool:
        """Return whether the next token would be written into a block that another sequence
        reads.
        """
        return num_tokens > 0 and self.num_tokens % self.block_size > 0 and self.blocks[-1].ref_cnt > 1


class Memory:
    """The tables of all requests, on one pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.tables: dict[str, list[KVCacheBlock]] = {}

    @property
    def num_held(self) -> int:
        """Return the number of blocks that requests hold."""
        return self.pool.num_usable_blocks - self.pool.get_num_free_blocks()

    def ids(self, request: Request) -> list[int]:
        """Return a request's block table; it is empty if the request holds no blocks."""
        return [block.block_id for block in self.tables.get(request.request_id, ())]

    def find(self, request: Request) -> list[KVCacheBlock]:
        """Return the cached blocks of a request's prefix; never all of it, because its last
        token must be computed.
        """
        hits: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def wanted(self, request: Request) -> int:
        """Return how many of a request's tokens are not computed yet: 1 if it decodes."""
        return request.num_tokens - request.num_computed_tokens

    def allocate(self, request: Request, num_tokens: int, hits: Sequence[KVCacheBlock] = (), must_fit: int = 0) -> bool:
        """Allocate blocks for a request's next tokens, after the prefix-cache hits; False if they
        do not fit.

        With `must_fit`, that many tokens must fit, although blocks are allocated for `num_tokens`
        only.
        """
        table = self.tables.get(request.request_id, [])
        start = request.num_computed_tokens + len(hits) * self.block_size
        missing, most = (
            max(0, -(-(start + tokens) // self.block_size) - len(table) - len(hits))
            for tokens in (num_tokens, max(num_tokens, must_fit))
        )
        if most > self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits):
            return False
        self.pool.touch(hits)
        self.tables[request.request_id] = [*table, *hits, *self.pool.get_new_blocks(missing)]
        return True

    def publish(self, request: Request) -> None:
        """Enter the full blocks of a request's computed tokens into the prefix cache."""
        table, num_full = self.tables[request.request_id], request.num_computed_tokens // self.block_size
        num_cached = sum(block.block_hash is not None for block in table)
        self.pool.cache_full_blocks(table, request.block_hashes, num_cached, max(num_cached, num_full))

    def free(self, request_id: str) -> None:
        """Release a request's blocks, if it has any, the last one first."""
        self.pool.free_blocks(reversed(self.tables.pop(request_id, [])))
