"""Test hits, slots that are looked ahead to, and what does not fit; vLLM's traces show the rest."""

from minivllm.config import CacheConfig
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request


def make(num_gpu_blocks: int = 11, **arguments: object) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_gpu_blocks=num_gpu_blocks, block_size=4), max_model_len=32, **arguments)  # type: ignore[arg-type]


def request(name: str, prompt: list[int]) -> Request:
    built = Request(name, prompt, max_tokens=9)
    built.enable_block_hashes(4)
    return built


def allocate(manager: KVCacheManager, request: Request, count: int, **arguments: object) -> list[int] | None:
    blocks = manager.allocate_slots(request, count, **arguments)  # type: ignore[arg-type]
    return None if blocks is None else [block.block_id for block in blocks]


def test_lookahead_slots_end_at_max_model_len() -> None:
    manager, a = make(), request("a", [*range(30)])
    assert len(allocate(manager, a, 30, num_lookahead_tokens=20) or []) == 8


def test_lookahead_slots_may_need_a_block_when_the_tokens_need_none() -> None:
    manager, a = make(), request("a", [*range(6)])
    allocate(manager, a, 5)
    a.num_computed_tokens = 5
    assert allocate(manager, a, 1, num_lookahead_tokens=1) == []
    assert allocate(manager, a, 1, num_lookahead_tokens=3) == [3]


def test_a_prefix_has_no_holes() -> None:
    manager, a = make(), request("a", [*range(12)])
    allocate(manager, a, 12)
    manager.block_pool.evict_blocks([manager.block_pool.blocks[2]])
    assert manager.get_computed_blocks(request("b", [*range(13)]))[1] == 4


def test_a_hit_leaves_out_its_last_block_for_a_drafter_that_looks_one_token_ahead() -> None:
    for use_eagle, expected in ((False, [1, 2]), (True, [1])):
        manager = make(use_eagle=use_eagle)
        allocate(manager, request("a", [*range(8)]), 8)
        blocks, num_tokens = manager.get_computed_blocks(request("b", [*range(8), 50]))
        assert ([block.block_id for block in blocks], num_tokens) == (expected, 4 * len(expected))
        assert manager.get_computed_blocks(request("c", [*range(40, 48)])) == ([], 0)
