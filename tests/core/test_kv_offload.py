"""The host tier's bookkeeping: pins, duplicates, and the order of eviction."""

import pytest

from minivllm.core.block_pool import BlockPoolError
from minivllm.core.kv_offload import CPUOffloadingManager, LookupResult

KEYS = [bytes([number]) * 4 for number in range(40)]
A, B, C, D, E, F, G = KEYS[:7]


def hits(manager: CPUOffloadingManager) -> set[bytes]:
    return {key for key in KEYS if manager.lookup(key) is LookupResult.HIT}


def begun(manager: CPUOffloadingManager, *keys: bytes) -> list[bytes]:
    """Begin to store the keys of one request; return those that are not there."""
    output = manager.prepare_store(keys)
    assert output is not None
    return output.keys_to_store


def stored(manager: CPUOffloadingManager, *keys: bytes) -> set[bytes]:
    """Store the keys of one request; return those that were evicted to make room."""
    before = hits(manager)
    manager.complete_store(begun(manager, *keys))
    return before - hits(manager)


def test_a_key_is_pending_while_it_is_stored_and_then_a_hit() -> None:
    manager = CPUOffloadingManager(2)
    output = manager.prepare_store([A])
    assert output is not None
    assert output.keys_to_store == [A]
    assert manager.lookup(A) is LookupResult.HIT_PENDING
    with pytest.raises(BlockPoolError):
        manager.prepare_load([A])
    manager.complete_store([A])
    assert manager.lookup(A) is LookupResult.HIT
    assert manager.lookup(B) is LookupResult.MISS
    assert manager.prepare_load([A]) == output.block_ids


def test_duplicates_are_stored_once() -> None:
    manager = CPUOffloadingManager(4)
    stored(manager, A)
    assert begun(manager, A, B, B) == [B]
    assert begun(manager, A, B) == []


def test_what_is_pinned_is_not_evicted_and_a_full_pool_takes_what_fits() -> None:
    manager = CPUOffloadingManager(2)
    stored(manager, A, B)
    manager.prepare_load([A])
    manager.prepare_load([A])
    assert begun(manager, C, D) == [C]
    assert hits(manager) == {A}
    assert manager.prepare_store([D]) is None
    assert not manager.reset()
    manager.complete_load([A])
    assert manager.prepare_store([D]) is None, "one of two loads is still under way"
    manager.complete_load([A])
    manager.complete_store([C])
    assert stored(manager, D) == {A}
    assert manager.reset()
    assert manager.lookup(D) is LookupResult.MISS


def test_a_store_does_not_evict_blocks_of_its_own_request() -> None:
    manager = CPUOffloadingManager(3)
    stored(manager, A, B)
    stored(manager, C)
    assert stored(manager, A, B, D) == {C}
    assert manager.prepare_store([A, B, D, E, F]) is None, "there is room for no more of it"
    assert manager.lookup(E) is LookupResult.MISS


def test_a_key_that_is_offered_again_counts_as_used() -> None:
    manager = CPUOffloadingManager(2)
    stored(manager, A)
    stored(manager, B)
    assert stored(manager, A) == set(), "it is there"
    assert stored(manager, C) == {B}


def test_lru_takes_tails_before_heads_and_what_was_touched_or_loaded_last() -> None:
    manager = CPUOffloadingManager(6)
    assert stored(manager, A, B, C) == stored(manager, D, E) == set(), "blocks that hold nothing are taken first"
    assert stored(manager, F, G) == {C}
    manager.touch([A, B, C])
    manager.prepare_load([D, E])
    assert stored(manager, KEYS[7]) == {G}
    manager.complete_load([D, E])
    assert [stored(manager, key) for key in KEYS[8:12]] == [{F}, {B}, {A}, {KEYS[7]}]
    assert stored(manager, *KEYS[12:14]) == {D, E}
