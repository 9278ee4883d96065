"""The books of the host tier: pins, duplicates, and who goes first under either policy."""

from collections import OrderedDict
from random import Random

import pytest
from core.invariants import check_hashes
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.block_pool import BlockPoolError
from minivllm.core.kv_offload import ARCCachePolicy, CPUOffloadingManager, LookupResult, LRUCachePolicy

KEYS = [bytes([number]) * 4 for number in range(40)]
A, B, C, D, E, F = KEYS[:6]


def anything(key: bytes) -> bool:
    return True


def stored(manager: CPUOffloadingManager, *keys: bytes) -> list[bytes]:
    """Stores keys of one request; returns those that were evicted for it."""
    output = manager.prepare_store(keys)
    assert output is not None
    manager.complete_store(output.keys_to_store)
    return [key for key, _ in output.evicted]


def test_a_key_is_pending_while_it_is_stored_and_then_a_hit() -> None:
    manager = CPUOffloadingManager(2)
    output = manager.prepare_store([A])
    assert output is not None
    assert (output.keys_to_store, output.evicted) == ([A], [])
    assert manager.lookup(A) is LookupResult.HIT_PENDING
    with pytest.raises(BlockPoolError):
        manager.prepare_load([A])
    manager.complete_store([A])
    assert manager.lookup(A) is LookupResult.HIT
    assert manager.lookup(B) is LookupResult.MISS
    assert manager.prepare_load([A]) == output.block_ids


def test_a_store_without_success_leaves_nothing() -> None:
    manager = CPUOffloadingManager(2)
    manager.prepare_store([A, B])
    manager.complete_store([A, B], success=False)
    assert manager.lookup(A) is LookupResult.MISS
    assert manager.num_pinned_blocks == manager.num_used_blocks == 0
    assert stored(manager, C, D) == [], "its blocks hold nothing, and are taken before anything is evicted"


def test_duplicates_are_stored_once() -> None:
    manager = CPUOffloadingManager(4)
    stored(manager, A)
    output = manager.prepare_store([A, B, B])
    assert output is not None
    assert output.keys_to_store == [B]
    again = manager.prepare_store([A, B])
    assert again is not None
    assert again.keys_to_store == []


def test_what_is_pinned_is_not_evicted_and_a_full_pool_takes_what_fits() -> None:
    manager = CPUOffloadingManager(2)
    stored(manager, A, B)
    manager.prepare_load([A])
    manager.prepare_load([A])
    output = manager.prepare_store([C, D])
    assert output is not None
    assert output.keys_to_store == [C]
    assert [key for key, _ in output.evicted] == [B]
    assert manager.prepare_store([D]) is None
    assert not manager.reset()
    manager.complete_load([A])
    assert manager.prepare_store([D]) is None, "one of two loads is still under way"
    manager.complete_load([A])
    manager.complete_store([C])
    assert stored(manager, D) == [A]
    assert manager.reset()
    assert manager.lookup(D) is LookupResult.MISS


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_does_not_evict_blocks_of_its_own_request(policy: str) -> None:
    manager = CPUOffloadingManager(3, policy)
    stored(manager, A, B)
    stored(manager, C)
    assert stored(manager, A, B, D) == [C]
    assert manager.prepare_store([A, B, D, E, F]) is None, "there is room for no more of it"
    assert manager.lookup(E) is LookupResult.MISS


def test_lru_takes_tails_before_heads_and_keeps_the_order_of_what_is_pinned() -> None:
    policy = LRUCachePolicy()
    policy.insert([A, B, C])
    policy.insert([D, E])
    assert policy.evict(1, anything) == [C]
    policy.touch([A, B, C])
    assert policy.evict(2, lambda key: key != E) == [D, B]
    assert policy.evict(3, anything) == [E, A]


def test_arc_keeps_what_came_twice_and_learns_from_what_comes_back() -> None:
    policy = ARCCachePolicy(4)
    policy.insert([A])
    policy.insert([B])
    policy.touch([A])
    assert (list(policy.t1), list(policy.t2)) == ([B], [A])
    policy.insert([C])
    assert policy.evict(1, anything) == [B]
    assert list(policy.b1) == [B]
    policy.touch([B])
    assert policy.target_t1_size == 1
    policy.insert([B])
    assert (list(policy.t1), list(policy.b1)) == ([C, B], [])
    policy.evict(2, lambda key: key in (A, C))
    assert (list(policy.t1), list(policy.b1), list(policy.b2)) == ([B], [C], [A])
    policy.touch([A])
    assert policy.target_t1_size == 0


def test_arc_moves_its_target_by_the_ratio_of_the_ghosts_once_a_request() -> None:
    policy = ARCCachePolicy(10)
    for name in ("b1", "b2"):
        setattr(policy, name, OrderedDict.fromkeys(KEYS[:2] if name == "b1" else KEYS[10:16]))
    policy.touch(KEYS[:2])
    assert policy.target_t1_size == 3, "6 / 2, though two of its keys are remembered"
    policy.touch([KEYS[10]])
    assert policy.target_t1_size == 2, "by 1 at least"
    policy.b1.update(OrderedDict.fromkeys(KEYS[20:38]))
    policy.target_t1_size = 9.0
    policy.touch([KEYS[10]])
    assert policy.target_t1_size == 9 - 20 / 6
    policy.target_t1_size = 9.5
    policy.touch([KEYS[0]])
    assert policy.target_t1_size == 10, "the capacity is the most"


def test_arc_evicts_from_t2_where_t1_is_below_its_target() -> None:
    policy = ARCCachePolicy(4)
    policy.insert([A, B])
    policy.touch([A, B])
    policy.insert([C])
    policy.target_t1_size = 2.0
    assert policy.evict(1, anything) == [B], "the tail of the request that came twice"
    policy.target_t1_size = 1.0
    assert policy.evict(1, anything) == [C]
    assert policy.evict(5, anything) == [A]
    assert list(policy.b2) == [B, A]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["lru", "arc"]))
def test_any_order_of_calls_leaves_the_books_right(seed: int, policy: str) -> None:
    rng = Random(seed)
    manager = CPUOffloadingManager(rng.randint(1, 12), policy)
    stores: list[list[bytes]] = []
    loads: list[list[bytes]] = []
    content: dict[int, bytes] = {}  # what a worker would have written where
    for _ in range(60):
        keys = rng.sample(KEYS, rng.randint(1, 8))
        match rng.randrange(5):
            case 0:
                output = manager.prepare_store(keys)
                if output is None:
                    pinned = {key for load in loads for key in load}
                    idle = [key for key in KEYS if manager.lookup(key) is LookupResult.HIT and key not in pinned]
                    assert set(idle) <= set(keys), "another key could have gone"
                    continue
                pinned = {key for load in loads for key in load}
                assert not pinned & {key for key, _ in output.evicted}, "a block was evicted while it was read"
                for key, block_id in output.evicted:
                    assert content[block_id] == key
                content.update(zip(output.block_ids, output.keys_to_store, strict=True))
                stores.append(output.keys_to_store)
            case 1 if stores:
                manager.complete_store(stores.pop(rng.randrange(len(stores))), success=rng.random() < 0.8)
            case 2:
                hits = [key for key in keys if manager.lookup(key) is LookupResult.HIT]
                assert [content[block_id] for block_id in manager.prepare_load(hits)] == hits
                loads.append(hits)
            case 3 if loads:
                load = loads.pop(rng.randrange(len(loads)))
                assert all(manager.lookup(key) is LookupResult.HIT for key in load)
                manager.complete_load(load)
            case _:
                manager.touch(keys)
        check_hashes(manager.block_pool)
        assert manager.num_used_blocks + manager.num_pending_blocks <= manager.num_blocks
        assert manager.num_pending_blocks == sum(map(len, stores))
    for keys in stores:
        manager.complete_store(keys)
    for keys in loads:
        manager.complete_load(keys)
    assert manager.num_pinned_blocks == 0
    used = manager.num_used_blocks
    assert len(manager.policy.evict(100, anything)) == used, "the policy knows just what can be loaded"
