"""The one decision that differs from vLLM v0.33.0: a block that was never computed cannot be found.

Blocks are published when they are scheduled. Under the priority policy a request that was scheduled
early in a step may be preempted for one scheduled after it; then it does not run, and the blocks
published for it are not computed. vLLM keeps their hashes. When the request comes back, vLLM
"finds" those blocks, and attends to whatever is in them.
"""

from core.driving import Drive, make_scheduler

from minivllm.config import DraftingConfig


def test_a_preempted_chunk_is_not_found_again_and_lies_in_the_free_queue_where_vllm_puts_it() -> None:
    budget = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 12}
    d = Drive(make_scheduler(num_gpu_blocks=12, max_model_len=44, policy="priority", **budget))
    b = d.add("B", 40, max_tokens=2, priority=5)
    assert d.step() == {"B": 16}, "alone: no threshold"
    d.add("A", 4, max_tokens=6, priority=0, arrival_time=1.0)
    assert d.step() == {"B": 12, "A": 4}
    table = d.blocks("B")
    # B is given 12 tokens, which fill three blocks; then A, behind it, wants a block and takes B's.
    assert d.step() == {"A": 1}
    assert b.num_preemptions == 1
    # Were they freed as blocks without a hash, at the front, the choice of blocks would leave
    # vLLM's from here on.
    free = d.scheduler.kv_cache_manager.block_pool.free_block_queue.first(d.num_free)
    assert [block.block_id for block in free][-len(table) :] == table[::-1]
    for _ in range(4):
        assert d.step() == {"A": 1}
    # 28 tokens of B were computed. vLLM v0.33.0 finds 32 and schedules 8.
    assert d.step() == {"B": 12}
    assert d.step() == {"B": 1}
    assert not d.scheduler.has_unfinished_requests()


def test_a_preempted_decode_that_would_have_filled_its_block_leaves_nothing_to_find() -> None:
    d = Drive(
        make_scheduler(
            num_gpu_blocks=7, max_model_len=16, policy="priority", drafting=DraftingConfig(num_lookahead_tokens=4)
        )
    )
    worst = d.add("worst", 6, max_tokens=9, priority=9)
    d.step()
    d.add("best", 8, max_tokens=8, priority=1)
    d.step()
    # The eighth token of `worst` would fill its second block. `best` takes its third, empty one,
    # not that one.
    assert d.step() == {"best": 1}
    assert (worst.num_preemptions, worst.num_tokens) == (1, 8)
    pool = d.scheduler.kv_cache_manager.block_pool
    results = [pool.get_cached_block(block_hash) is not None for block_hash in worst.block_hashes]
    assert results == [True, False], "what was computed stays findable, what was not does not"
