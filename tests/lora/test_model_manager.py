"""Test which adapters are in slots and in host memory after any order of calls."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm.config import EMBEDDED_MODEL, LoRAConfig
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.lora_request import LoRARequest
from minivllm.lora.lora_model import LoRAPair
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.loader import load_model

ADAPTERS = Path(__file__).parents[1] / "lora_adapters"


@pytest.fixture(scope="module")
def used_manager() -> LRUCacheLoRAModelManager:
    model, _ = load_model(EMBEDDED_MODEL, "cpu", "float32")
    config = LoRAConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=3)
    return LRUCacheLoRAModelManager(model, config, AdapterSlots(2))


@pytest.fixture
def manager(used_manager: LRUCacheLoRAModelManager) -> LRUCacheLoRAModelManager:
    """Return the only manager, without the adapters that other tests have added."""
    empty(used_manager)
    return used_manager


def adapter(manager: LRUCacheLoRAModelManager, number: int):
    """Make an adapter of q_proj in layer 0 whose elements are all its own number."""
    inputs, outputs = manager.shape_of((0, "q_proj"))
    whole = LoRAPair(torch.full((1, inputs), float(number)), torch.full((outputs, 1), 1.0))
    return manager.share_of({(0, "q_proj"): whole})


def empty(manager: LRUCacheLoRAModelManager) -> None:
    for lora_id in manager.list_adapters():
        manager.remove_adapter(lora_id)


def held(manager: LRUCacheLoRAModelManager) -> list[float | None]:
    """Return the adapter whose numbers are in each slot; None for an empty slot."""
    method = manager.modules[0, "qkv_proj"]
    slots = manager.lora_index_to_id
    return [None if adapter is None else method.lora_a[0, slot, 0, 0].item() for slot, adapter in enumerate(slots)]


def test_the_slots_of_vllms_manager(manager):
    """The sequence of adapters is the one in vLLM's own test of its manager."""

    def add(number: int) -> None:
        if number not in manager.list_adapters():
            manager.add_adapter(number, adapter(manager, number))

    for act, number, wanted in (
        ("activate", 1, [1, None]),
        ("activate", 2, [1, 2]),
        ("activate", 3, [3, 2]),
        ("remove", 2, [3, None]),
        ("activate", 1, [3, 1]),
        ("deactivate", 3, [None, 1]),
        ("activate", 2, [2, 1]),
        ("activate", 3, [2, 3]),
        ("pin", 2, [2, 3]),
        ("activate", 1, [2, 1]),
    ):
        if act == "activate":
            add(number)
        getattr(manager, f"{act}_adapter")(number)
        assert manager.lora_index_to_id == wanted, (act, number)
        assert held(manager) == wanted
    manager.pin_adapter(1)
    assert_refused("pinned", manager.activate_adapter, 3)
    assert_refused("pinned", manager.pin_adapter, 3)
    assert_refused("adapter 7 is not there", manager.pin_adapter, 7)
    assert held(manager) == [2, 1]


def test_a_slot_is_filled_only_where_it_holds_another(manager):
    for number in (1, 2):
        manager.add_adapter(number, adapter(manager, number))
        manager.activate_adapter(number)
    before = manager.num_activations
    manager.activate_adapter(1)
    manager.deactivate_adapter(1)
    manager.activate_adapter(1)
    assert manager.num_activations == before
    assert held(manager) == [1, 2]


ACTS = st.tuples(st.sampled_from(["add", "activate", "deactivate", "remove", "pin"]), st.integers(1, 6))


@settings(max_examples=40, deadline=None)
@given(acts=st.lists(ACTS, max_size=30))
def test_whatever_the_order_the_tiers_hold_together(used_manager, acts):
    """Plain lists decide what should be in host memory, and slots of their own which adapters they have."""
    manager = used_manager
    empty(manager)
    host, slots = [], AdapterSlots(2)  # host memory has the least recently used first
    for act, number in acts:
        if act in ("activate", "pin") and number not in host:
            continue
        if act == "add":
            if number not in host and len(host) == 3:
                slots.deactivate(gone := next(adapter for adapter in host if adapter not in slots.pinned))
                host.remove(gone)
            manager.add_adapter(number, adapter(manager, number))
        elif act == "remove":
            assert manager.remove_adapter(number) == (number in host)
            slots.deactivate(number)
        elif act in ("activate", "pin") and number not in slots and len(slots.pinned) == 2:
            assert_refused("pinned", getattr(manager, f"{act}_adapter"), number)
        else:
            getattr(manager, f"{act}_adapter")(number)
            if act != "deactivate":
                slots.activate(number)
            if act != "activate":
                getattr(slots, act)(number)
        if act != "deactivate":
            host = [other for other in host if other != number] + [number] * (act != "remove")
        assert (manager.list_adapters(), manager.lora_index_to_id) == (host, slots.slots)
        assert held(manager) == slots.slots


def test_host_memory_full_of_pinned_adapters_takes_no_other():
    model, _ = load_model(EMBEDDED_MODEL, "cpu", "float32")
    manager = LRUCacheLoRAModelManager(model, LoRAConfig(max_loras=1, max_cpu_loras=1), AdapterSlots(1))
    manager.add_adapter(1, {})
    manager.pin_adapter(1)
    assert_refused("all 1 places .* are pinned", manager.add_adapter, 2, {})
    manager.deactivate_adapter(1)
    manager.add_adapter(2, {})
    assert manager.list_adapters() == [2], "an adapter without its slot is pinned no more"


@pytest.fixture
def worker() -> LRUCacheWorkerLoRAManager:
    model, _ = load_model(EMBEDDED_MODEL, "cpu", "float32")
    return LRUCacheWorkerLoRAManager(model, LoRAConfig(max_loras=2, max_cpu_loras=2), max_rows=16)


def requests(*names: str) -> list[LoRARequest]:
    return [LoRARequest(name, "abc".index(name) + 1, str(ADAPTERS / name)) for name in names]


def test_a_step_never_loses_an_adapter_of_its_own(worker):
    """Adapters that are already loaded are used first, in whatever order the requests come."""
    worker.set_active_adapters(requests("a", "b"))
    assert worker.num_loads == 2
    worker.set_active_adapters(requests("c", "a"))
    assert worker.num_loads == 3, "a stayed, though it was the least recently used"
    slots = worker.set_active_adapters(requests("b", "c"))
    assert {worker.manager.lora_index_to_id[slot]: slot for slot in slots.values()} == slots
    assert worker.num_loads == 4


WRONG = [
    ({"max_loras": 0}, "max_loras is 0"), ({"max_lora_rank": 12}, "one of 1, 8, 16"),
    ({"max_lora_rank": True}, "one of"), ({"max_loras": 4, "max_cpu_loras": 3}, "at least max_loras"),
    ({"max_cpu_loras": "3"}, "max_cpu_loras"), ({"lora_dtype": "int8"}, "lora_dtype"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_refused_in_one_line(settings, message):
    assert_refused(message, LoRAConfig, **settings)
