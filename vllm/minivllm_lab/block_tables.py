"""Block tables and prefix cache of a script's own engine, on the pool of lessons 02 and 05."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.request import Request


class BlockTables:
    """Who holds which blocks. A request gets all that it will ever need when it is admitted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.tables: dict[str, list[KVCacheBlock]] = {}

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.pool.num_usable_blocks - self.pool.get_num_free_blocks()

    def ids(self, request: Request) -> list[int]:
        """A request's block table; empty if it holds no blocks."""
        return [block.block_id for block in self.tables.get(request.request_id, ())]

    def find(self, request: Request) -> list[KVCacheBlock]:
        """Published blocks of a request's beginning; never all of it, because its last token must be computed."""
        found: list[KVCacheBlock] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, request: Request, hits: list[KVCacheBlock]) -> bool:
        """Gives it `hits`, and new blocks for the rest of its prompt and its answer; False if they do not fit."""
        missing = -(-(request.num_tokens + request.max_tokens - 1) // self.block_size) - len(hits)
        if missing > self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hits):
            return False
        self.pool.touch(hits)
        self.tables[request.request_id] = hits + self.pool.get_new_blocks(missing)
        return True

    def publish(self, request: Request) -> None:
        """Lets others find the full blocks of its computed tokens."""
        table, num_full = self.tables[request.request_id], request.num_computed_tokens // self.block_size
        num_cached = sum(block.block_hash is not None for block in table)
        self.pool.cache_full_blocks(table, request.block_hashes, num_cached, max(num_cached, num_full))

    def free(self, name: str) -> None:
        """Frees a request's blocks, last block first; one without blocks is no mistake."""
        self.pool.free_blocks(reversed(self.tables.pop(name, [])))


class Memory(BlockTables):
    """Tables that grow: a request gets blocks when it needs them, one after another."""

    def wanted(self, request: Request) -> int:
        """Tokens that a request has not computed: one if it decodes."""
        return request.num_tokens - request.num_computed_tokens

    def allocate(self, request: Request, num_tokens: int, hits: Sequence[KVCacheBlock] = (), must_fit: int = 0) -> bool:
        """Blocks for its next tokens, behind those that were found; False, and nothing changes, if they do not fit.

        `must_fit`: so many tokens, more than it gets now, have to fit.
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
