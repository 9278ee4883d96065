"""Invariants of the scheduler's bookkeeping that hold after every call."""

from collections import Counter

from minivllm.core.block_pool import BlockPool
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.kv_connector.offload.scheduler import OffloadScheduler


def check_pool(pool: BlockPool, holders: Counter[int]) -> None:
    """Check the pool against `holders`, which counts the requests that hold each block, by block
    id.
    """
    free = [block.block_id for block in pool.free_block_queue.first(pool.free_block_queue.num_free_blocks)]
    assert len(free) == len(set(free)) == pool.get_num_free_blocks(), "a block is in the free queue twice"
    assert not set(free) & set(holders), "a held block is in the free queue"
    assert len(free) + len(holders) == pool.num_usable_blocks, "a block is lost"
    assert 0 not in free
    assert 0 not in holders, "the null block was handed out"
    for block in pool.blocks[1:]:
        assert block.ref_cnt == holders[block.block_id], f"{block} has {holders[block.block_id]} holders"
    check_hashes(pool)


def check_hashes(pool: BlockPool) -> None:
    """Check that each block's hash finds a block with that hash, and that nothing else can be
    found.
    """
    published = {block.block_id: block.block_hash for block in pool.blocks if block.block_hash is not None}
    for block_hash in published.values():
        result = pool.get_cached_block(block_hash)
        assert result is not None
        assert result.block_hash == block_hash
    assert len(pool.cached_block_hash_to_block) == len(set(published.values()))


def _remote(scheduler: Scheduler) -> tuple[list[Request], list[Request]]:
    """Return the requests that wait for remote KV, and the finished ones whose blocks are still
    held.
    """
    if scheduler.remote is None:
        return [], []
    holding = [*scheduler.remote.kv_holding_waiting.values(), *scheduler.remote.received]
    return holding, list(scheduler.remote.releasing.values())


def _held_for_copies(scheduler: Scheduler) -> list[int]:
    """Return the ids of blocks that are being copied to another tier, once for each copy."""
    side = scheduler.remote and scheduler.remote.connector
    stores = side._stores.values() if isinstance(side, OffloadScheduler) else ()
    return [block.block_id for store in stores for block in store.blocks]


def holds_blocks(request: Request) -> bool:
    """Return whether a waiting request's blocks are filled or being filled."""
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens > 0


def check_scheduler(scheduler: Scheduler, under_way: bool = False) -> None:
    """Check the scheduler between two steps, or while a scheduled step is `under_way`."""
    manager, config = scheduler.kv_cache_manager, scheduler.config
    tables = {request_id: manager.get_block_ids(request_id) for request_id in manager.req_to_blocks}
    for table in tables.values():
        assert len(table) == len(set(table)), "a table holds a block twice"
    holders = Counter(block_id for table in tables.values() for block_id in table)
    holders.update(_held_for_copies(scheduler))
    check_pool(manager.block_pool, holders)

    running, waiting = scheduler.running, list(scheduler.waiting)
    holding, releasing = _remote(scheduler)
    ids = [request.request_id for request in [*running, *waiting, *holding]]
    assert sorted(ids) == sorted(scheduler.requests), "a request is lost, or stands in two queues"
    holders = [*running, *(request for request in holding if holds_blocks(request)), *releasing]
    assert set(tables) == {request.request_id for request in holders}, "only running requests hold blocks"
    assert len(running) <= config.max_num_seqs
    loras = {request.lora_request.lora_int_id for request in running if request.lora_request}
    assert len(loras) <= config.max_loras

    for request in running:
        assert request.status is RequestStatus.RUNNING
        known = request.num_tokens + request.num_output_placeholders  # or foreseen
        most = known + config.drafting.num_speculative_tokens if under_way else known - 1
        assert request.num_computed_tokens > 0 or scheduler.remote
        assert request.num_computed_tokens <= min(most, config.max_model_len - 1)
        assert request.num_computed_tokens <= len(tables[request.request_id]) * manager.block_size
    for request in waiting:
        assert not request.status.is_finished
        assert request.status is not RequestStatus.RUNNING
        assert (request.status is RequestStatus.PREEMPTED) == (request.num_preemptions > 0) or scheduler.remote
        assert request.num_computed_tokens == 0
        assert not request.spec_token_ids
    for request in holding:
        waits = scheduler.remote is not None and request.request_id in scheduler.remote.kv_holding_waiting
        assert (request.status is RequestStatus.WAITING_FOR_REMOTE_KVS) == waits
    for request in scheduler.requests.values():
        assert request.num_tokens == len(request.all_token_ids) < config.max_model_len
        assert request.num_output_tokens < request.max_tokens
