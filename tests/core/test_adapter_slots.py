"""Slots of adapters: vLLM's sequence with two slots, and against a plain list in random orders."""

import random

import pytest
from refusals import assert_refused

from minivllm.core.adapter_slots import AdapterSlots
from minivllm.errors import MinivllmError


def test_the_sequence_of_vllms_own_test():
    """`test_lora_lru_cache_model_manager` of v0.33.0, with two slots."""
    slots = AdapterSlots(2)
    for operation, adapter, expected in (
        ("activate", 1, [1, None]), ("activate", 2, [1, 2]), ("activate", 3, [3, 2]), ("deactivate", 2, [3, None]),
        ("activate", 1, [3, 1]), ("deactivate", 3, [None, 1]), ("activate", 2, [2, 1]), ("activate", 3, [2, 3]),
        ("pin", 2, [2, 3]), ("activate", 1, [2, 1]), ("pin", 1, [2, 1]),
    ):  # fmt: skip
        getattr(slots, operation)(adapter)
        assert slots.slots == expected, (operation, adapter)
    for operation in ("activate", "pin"):
        assert_refused("max_loras", getattr(slots, operation), 3)
    assert slots.slots == [2, 1]
    slots.deactivate(2)
    assert slots.activate(3) == 0
    assert 3 in slots
    assert 2 not in slots


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_list_sorted_by_last_use(seed: int):
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    slots, order, pinned, held = AdapterSlots(count), [], set(), [None] * count
    for _ in range(300):
        adapter = draw.randint(1, 9)
        kind = draw.choice(["activate", "activate", "activate", "deactivate", "pin"])
        victims = [one for one in order if one not in pinned]
        if kind == "deactivate":
            slots.deactivate(adapter)
            held = [None if one == adapter else one for one in held]
            order, pinned = [one for one in order if one != adapter], pinned - {adapter}
        elif adapter not in order and None not in held and not victims:
            with pytest.raises(MinivllmError):
                getattr(slots, kind)(adapter)
        else:
            if adapter not in order and None not in held:
                held[held.index(victims[0])] = None
                order.remove(victims[0])
            if adapter not in order:
                held[held.index(None)] = adapter
                order.append(adapter)
            elif kind == "activate":
                order.remove(adapter)
                order.append(adapter)
            pinned |= {adapter} if kind == "pin" else set()
            assert getattr(slots, kind)(adapter) == (held.index(adapter) if kind == "activate" else None)
        assert slots.slots == held
        assert slots.pinned == pinned
