"""Compare the slots of adapters with a plain list; vLLM's own sequence is in
`lora/test_model_manager.py`.
"""

import random

import pytest
from refusals import assert_refused

from minivllm.core.adapter_slots import AdapterSlots


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_list_sorted_by_last_use(seed: int):
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    slots = AdapterSlots(count)
    order, pinned, held = [], set(), [None] * count
    for _ in range(300):
        adapter = draw.randint(1, 9)
        kind = draw.choice(["activate", "activate", "activate", "deactivate", "pin"])
        victims = [each for each in order if each not in pinned]
        if kind == "deactivate":
            slots.deactivate(adapter)
            held = [None if each == adapter else each for each in held]
            order = [each for each in order if each != adapter]
            pinned -= {adapter}
        elif adapter not in order and None not in held and not victims:
            assert_refused("max_loras", getattr(slots, kind), adapter)
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
