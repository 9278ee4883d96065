"""Decide what running requests keep when blocks that should have been loaded hold nothing valid.

Blocks are published when they are scheduled, so other requests may have found an invalid block, or
blocks that were computed after it. The first request in the batch with such a block recomputes it,
and all of its own blocks after it. Other requests with the same block share it, so they only wait.

In vLLM v0.33.0: `_update_requests_with_invalid_blocks` in `vllm/v1/core/sched/scheduler.py`, which
considers the blocks that were to be loaded, but not those computed after them, and lets the other
requests run at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request, RequestStatus


class LoadFailures:
    """A record of which request recomputes which block."""

    def __init__(self) -> None:
        self._owners: dict[int, Request] = {}
        self._bad: set[int] = set()
        self._needs: dict[str, tuple[int, dict[str, tuple[Request, int]]]] = {}

    def truncate(
        self,
        requests: Iterable[Request],
        invalid_block_ids: Collection[int],
        manager: KVCacheManager,
        given_back: Collection[Sequence[int]] = (),
    ) -> list[Request]:
        """Cut each request with an invalid block back to the tokens that are valid, or that others
        recompute; return these requests.

        Blocks to be recomputed lose their hashes, and so do invalid blocks, and those after them,
        in the tables `given_back` since the step was scheduled.
        """
        requests = list(requests)
        self._owners = {}
        self._bad = set(invalid_block_ids)
        for request in requests:
            self._wait_no_more(request, manager)
        self._withdraw(given_back, manager)
        affected = [request for request in requests if self._truncate(request, manager)]
        self._withdraw(given_back, manager)
        return affected

    def _withdraw(self, tables: Iterable[Sequence[int]], manager: KVCacheManager) -> None:
        """Withdraw the hashes of each table's first invalid block and of all blocks after it, which
        were computed with it.
        """
        blocks = manager.block_pool.blocks
        for block_ids in tables:
            start = next((place for place, block_id in enumerate(block_ids) if self._is_bad(block_id)), len(block_ids))
            manager.block_pool.evict_blocks(blocks[block_id] for block_id in block_ids[start:])
            self._bad.update(block_ids[start:])

    def _wait_no_more(self, request: Request, manager: KVCacheManager) -> None:
        """Stop a request from waiting for blocks that others recompute: it computes them itself,
        since they may have failed again.
        """
        if request.request_id in self._needs:
            start, _ = self._needs.pop(request.request_id)
            set_computed(request, min(start, request.num_computed_tokens // manager.block_size), manager)

    def _is_bad(self, block_id: int) -> bool:
        return block_id in self._bad or block_id in self._owners

    def _truncate(self, request: Request, manager: KVCacheManager) -> bool:
        block_ids = manager.get_block_ids(request.request_id)
        block_ids = block_ids[: -(-request.num_computed_tokens // manager.block_size)]
        # Everything behind the first bad block was computed with it.
        start = next((place for place, block_id in enumerate(block_ids) if self._is_bad(block_id)), None)
        if start is None:
            return False
        end = start  # of those that others compute
        needs: dict[str, tuple[Request, int]] = {}
        # Blocks that an earlier request recomputes need not be computed by this one, only awaited.
        while end < len(block_ids) and (owner := self._owners.get(block_ids[end])):
            end += 1
            needs[owner.request_id] = owner, end * manager.block_size
        # From here on this request computes the blocks, for itself and for others.
        self._owners |= dict.fromkeys(block_ids[end:], request)
        set_computed(request, end, manager)
        self.forget(request)
        if needs:
            self._needs[request.request_id] = start, needs
        return True

    def must_wait(self, request: Request, also: Mapping[str, int], manager: KVCacheManager) -> bool:
        """Return whether other requests have yet to compute blocks that this request reads.

        `also` maps requests to the tokens already scheduled for them in this step. If one of the
        others is no longer running, this request computes the blocks itself.
        """
        start, needs = self._needs.get(request.request_id, (0, {}))
        if not needs:
            return False
        # An owner was preempted or has ended, so nobody would compute these blocks.
        if any(owner.status is not RequestStatus.RUNNING for owner, _ in needs.values()):
            self.forget(request)
            table = manager.req_to_blocks[request.request_id]
            if manager.enable_caching:  # what was computed meanwhile has its hash again
                unpublished = (place for place, block in enumerate(table) if block.block_hash is None)
                start = next((place for place in unpublished if place >= start), len(table))
            set_computed(request, min(start, request.num_computed_tokens // manager.block_size), manager)
            return False
        if any(owner.num_computed_tokens + also.get(name, 0) < need for name, (owner, need) in needs.items()):
            return True
        self.forget(request)
        return False

    def concern(self, request: Request, manager: KVCacheManager) -> bool:
        """Return whether a request holds blocks that are invalid or that another request will
        recompute.
        """
        return any(self._is_bad(block_id) for block_id in manager.get_block_ids(request.request_id))

    def forget(self, request: Request) -> None:
        """Forget which blocks this request needs from others."""
        self._needs.pop(request.request_id, None)


def set_computed(request: Request, num_blocks: int, manager: KVCacheManager) -> None:
    """Keep only a request's first `num_blocks` blocks as computed; the blocks after them are no
    longer published.
    """
    name = request.request_id
    table = manager.req_to_blocks[name]
    manager.block_pool.evict_blocks(table[num_blocks:])
    manager.num_cached_block[name] = min(manager.num_cached_block[name], num_blocks)
    # The last token is computed in any case, since its logits are needed.
    request.num_computed_tokens = min(num_blocks * manager.block_size, request.num_tokens - 1)
    request.num_cached_tokens = min(request.num_cached_tokens, request.num_computed_tokens)
