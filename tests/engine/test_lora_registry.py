"""Test what the core tells the ranks and the scheduler when a pinned adapter is removed while a
request uses it.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from minivllm.core.lora_request import LoRARequest
from minivllm.engine.lora_registry import AdapterRefused, LoRARegistry

PINNED = LoRARequest("pinned", 1, "adapters/pinned")


@pytest.fixture
def core():
    """Make a registry, its scheduler and a list of calls to the ranks; a waiting request uses
    the pinned adapter.
    """
    told = []

    def collective_rpc(method, *arguments):
        if method == "lora_slots":
            return [[None if told[-1] == ("remove_lora", 1) else 1]]
        told.append((method, *arguments))
        return [("as it was", "")] if method == "add_lora" else [None]

    scheduler = SimpleNamespace(
        config=SimpleNamespace(max_loras=1),
        pinned_loras=set(),
        requests={"x": SimpleNamespace(lora_request=PINNED)},
        running_loras=lambda: set(scheduler.pinned_loras),
    )
    registry = LoRARegistry(SimpleNamespace(collective_rpc=collective_rpc), lambda: scheduler)
    registry.add(PINNED)
    registry.pin_lora(1)
    return registry, scheduler, told


def test_the_scheduler_counts_it_as_long_as_the_ranks_have_it_pinned(core):
    registry, scheduler, told = core
    assert registry.remove_lora(1)
    assert scheduler.pinned_loras == {1}
    assert ("remove_lora", 1) not in told
    scheduler.requests.clear()
    assert registry.named_slots() == [("pinned", True)]
    registry.forget_unused()
    assert scheduler.pinned_loras == set()
    assert registry.named_slots() == [("", False)]
    assert told[-1] == ("remove_lora", 1)


def test_one_that_comes_back_is_still_pinned(core):
    registry, scheduler, told = core
    assert registry.remove_lora(1)
    assert registry.add(PINNED) == replace(PINNED, fingerprint="as it was")
    scheduler.requests.clear()
    registry.forget_unused()
    assert scheduler.pinned_loras == {1}
    assert ("remove_lora", 1) not in told


def test_ranks_that_have_read_different_files_both_forget_them(core):
    registry, _, told = core
    answers = {"add_lora": [("old", ""), ("new", "")]}

    def collective_rpc(method, *arguments):
        told.append((method, *arguments))
        return answers.get(method)

    registry._executor.collective_rpc = collective_rpc
    with pytest.raises(AdapterRefused, match="changed while they were read: add the adapter once more"):
        registry.add(LoRARequest("torn", 2, "adapters/torn"))
    assert told[-1] == ("remove_lora", 2)
    answers["add_lora"] = [("new", ""), ("new", "")]
    assert registry.add(LoRARequest("torn", 2, "adapters/torn")).fingerprint == "new"
