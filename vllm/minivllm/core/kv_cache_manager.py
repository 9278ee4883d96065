"""Block tables of requests: prefix-cache lookup, allocation of slots for the next tokens, and
freeing.

In vLLM v0.33.0: `vllm/v1/core/kv_cache_manager.py` (`KVCacheManager`), here for one KV-cache group
of full attention: `vllm/v1/core/single_type_kv_cache_manager.py` (`FullAttentionManager`).
"""

from collections.abc import Callable, Sequence

from minivllm.config import CacheConfig
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.core.request import Request, RequestStatus
from minivllm.core.stats import PrefixCacheStats


class KVCacheManager:
    """The block tables of all requests, on the host. A table only grows at its end; equal blocks
    are never merged.
    """

    def __init__(
        self,
        cache_config: CacheConfig,
        max_model_len: int,
        watermark: float = 0.0,
        make_block_pool: Callable[[int, bool], BlockPool] = BlockPool,
        use_eagle: bool = False,
    ) -> None:
        self.use_eagle = use_eagle
        self.block_size = cache_config.block_size
        self.enable_caching = cache_config.enable_prefix_caching
        self.max_model_len = max_model_len
        self.watermark_blocks = int(watermark * cache_config.num_gpu_blocks)
        self.block_pool = make_block_pool(cache_config.num_gpu_blocks, self.enable_caching)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        self.prefix_cache_stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """Return the fraction of the usable blocks that requests hold, 0 to 1."""
        return self.block_pool.get_usage()

    def get_block_ids(self, request_id: str) -> list[int]:
        """Return the block table of a request; empty if it holds no blocks."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, ())]

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Return the longest cached prefix of a request: its blocks, not touched yet, and its
        length in tokens.

        It has at most `num_tokens - 1` tokens: the last one must be computed, because its logits
        are needed. With `use_eagle` the last matching block is left out: what a drafter has cached
        at a block's last position depends on the next token, which is known to be the same only for
        the blocks before.
        """
        blocks: list[KVCacheBlock] = []
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return blocks, 0
        max_num_blocks = (request.num_tokens - 1) // self.block_size
        for block_hash in request.block_hashes[:max_num_blocks]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        if self.use_eagle:
            blocks = blocks[:-1]
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: Sequence[KVCacheBlock] = (),
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        reserved_blocks: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> Sequence[KVCacheBlock] | None:
        """Allocate the blocks for a request's next `num_new_tokens` tokens; if they do not fit,
        change nothing.

            | computed | prefix hit            | external                       | new, drafts included | lookahead |
                         `new_computed_blocks`   `num_external_computed_tokens`   `num_lookahead_tokens`

        Return the blocks added to the table, excluding prefix hits, or None if they do not fit.
        Full blocks are published here, before they are computed: a request that finds them runs in
        the same forward pass or a later one. Draft tokens are never published.

        - `full_sequence_must_fit`: for admissions; all known tokens must fit, not just the new
          ones.
        - `delay_cache_blocks`: publish nothing yet, because the external tokens arrive later.
        - `reserved_blocks`: free blocks that this request must leave to others.
        - `has_scheduled_reqs`: other requests are running, so an admission must leave the watermark
          free.
        """
        offset = request.num_computed_tokens % self.block_size
        if offset > 0 and offset + num_new_tokens + num_lookahead_tokens < self.block_size:
            return ()  # Most decodes: the tokens go into a block already held, and do not fill it.

        table = self.req_to_blocks.get(request.request_id, [])
        num_computed = request.num_computed_tokens + len(new_computed_blocks) * self.block_size
        num_tokens = num_computed + num_external_computed_tokens + num_new_tokens
        # Lookahead must not reach beyond the longest request.
        num_slots = min(num_tokens + num_lookahead_tokens, self.max_model_len)
        num_held = len(table) + len(new_computed_blocks)
        num_missing = -(-num_slots // self.block_size) - num_held

        new_blocks: Sequence[KVCacheBlock] = ()
        if num_missing > 0:
            num_required = num_missing
            # Admit only what can be computed to its end; otherwise a prompt could be preempted by
            # its own next chunk.
            if full_sequence_must_fit:
                num_required = max(num_missing, self.num_missing_blocks(request) - len(new_computed_blocks))
            num_available = self._num_available(request, new_computed_blocks, has_scheduled_reqs)
            if num_required > num_available or num_missing > num_available - reserved_blocks:
                return None
            # Before new blocks are taken, which could otherwise be these.
            self.block_pool.touch(new_computed_blocks)
            new_blocks = self.block_pool.get_new_blocks(num_missing)
            table += [*new_computed_blocks, *new_blocks]
            self.req_to_blocks[request.request_id] = table
            self.num_cached_block.setdefault(request.request_id, len(new_computed_blocks))

        # Never beyond the known tokens: drafts may be rejected.
        if not delay_cache_blocks:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new_blocks

    def num_missing_blocks(self, request: Request) -> int:
        """Return how many blocks a request lacks to hold all of its known tokens."""
        num_held = len(self.req_to_blocks.get(request.request_id, ()))
        return max(0, -(-min(request.num_tokens, self.max_model_len) // self.block_size) - num_held)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish those full blocks of a request's first `num_tokens` tokens that are not
        published yet.
        """
        if not self.enable_caching:
            return
        num_full = num_tokens // self.block_size
        # Blocks are published once and in order, so a counter is enough.
        num_cached = self.num_cached_block[request.request_id]
        if num_full > num_cached:
            table = self.req_to_blocks[request.request_id]
            self.block_pool.cache_full_blocks(table, request.block_hashes, num_cached, num_full)
            self.num_cached_block[request.request_id] = num_full

    def free(self, request: Request, *, withdraw_uncomputed: bool = False) -> None:
        """Free a request's blocks, last block first, so that the tail of a prefix is evicted before
        its head.

        `withdraw_uncomputed`: the request had been scheduled, and its blocks published, in a step
        that it will not run in. Blocks that are not fully computed lose their hash. vLLM v0.33.0
        keeps it, and may then serve keys and values that were never computed; this is the one place
        where we decide differently. The blocks' positions in the free queue are the same as vLLM's.
        """
        table = self.req_to_blocks.pop(request.request_id, [])
        self.num_cached_block.pop(request.request_id, None)
        self.block_pool.free_blocks(reversed(table))
        if withdraw_uncomputed:
            self.block_pool.evict_blocks(table[request.num_computed_tokens // self.block_size :])

    def record_prefix_cache_stats(self, request: Request, num_hit_tokens: int) -> None:
        """Count the lookup of a request being admitted; lookups that do not lead to an admission
        are not counted.
        """
        if self.enable_caching and not request.skip_reading_prefix_cache:
            self.prefix_cache_stats = self.prefix_cache_stats.with_lookup(
                request.num_tokens, num_hit_tokens, request.num_preemptions > 0
            )

    def _num_available(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock], has_scheduled_reqs: bool
    ) -> int:
        # Hit blocks in the free queue are about to leave it, so they cannot be allocated.
        num_hit_and_free = sum(block.ref_cnt == 0 for block in new_computed_blocks)
        admission = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        watermark = self.watermark_blocks if admission and has_scheduled_reqs else 0
        return self.block_pool.get_num_free_blocks() - num_hit_and_free - watermark
