"""Lesson 05's block hashes find what the engine's find: the hits of random prompts, token for
token.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path

from minivllm.config import CacheConfig
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.request import Request
from minivllm_lab.exercise import load

lesson = load(script_path("05"))
PROMPTS = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from((None, "ann", "bob")))


@given(st.lists(PROMPTS, max_size=20), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_the_same_tokens_are_found(prompts, block_size):
    """Prompts arrive one after another at a pool that is never full; each then leaves its blocks to
    the others.
    """
    manager = KVCacheManager(CacheConfig(num_gpu_blocks=500, block_size=block_size), 64)
    cached = set()
    for number, (tokens, salt) in enumerate(prompts):
        request = Request(str(number), tokens, max_tokens=1, cache_salt=salt)
        request.enable_block_hashes(block_size)
        blocks, hit = manager.get_computed_blocks(request)
        hashes = lesson.block_hashes(tokens, block_size, (salt or "").encode())
        assert lesson.find_longest_cache_hit(hashes, len(tokens), block_size, cached) == hit
        manager.allocate_slots(request, len(tokens) - hit, new_computed_blocks=blocks)
        manager.free(request)
        cached.update(hashes)
