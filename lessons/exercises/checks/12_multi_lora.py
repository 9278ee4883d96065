"""Check the part of exercise 12 that needs nothing but Python: a page runs these checks, too."""

import random

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.errors import MinivllmError
from minivllm_lab.multi_lora.learner_policy import learner_policy


def _steps(requests, max_loras, max_num_seqs, policy=DEFAULT_POLICY, steps=None):
    """Return what runs in each step of the engine's scheduler; requests are (name, adapter, steps, arrival)."""
    limits = SchedulerConfig(
        max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_loras=max_loras
    )
    cache = CacheConfig(num_gpu_blocks=200, enable_prefix_caching=False)
    scheduler, found = Scheduler(limits, cache, policy), []
    last = max(one[3] for one in requests)
    while scheduler.has_unfinished_requests() or len(found) <= last:
        for name, adapter, runs, arrives in requests:
            if arrives == len(found):
                lora = LoRARequest(f"adapter {adapter}", adapter, f"/adapters/{adapter}") if adapter else None
                scheduler.add_request(Request(name, [0], max_tokens=runs, lora_request=lora))
        decided = scheduler.schedule()
        found.append(list(decided.num_scheduled_tokens))
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in found[-1]}))
        assert len(found) < 500, "the requests never end: somebody is never admitted"
    return found[:steps]


# ---- on paper --------------------------------------------------------------------------------------------------------


def check_prediction(module):
    """Steps 1 to 4 of A to E are what the engine's scheduler decides."""
    requests = [("A", 1, 2, 0), ("B", 2, 4, 0), ("C", 3, 2, 0), ("D", 0, 1, 0), ("E", 2, 1, 0)]
    expected, found = _steps(requests, 2, 3, steps=4), module.first_steps()
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert len(found) == 4, f"{len(found)} steps, not 4"
    for number, (one, right) in enumerate(zip(found, expected), start=1):
        assert list(one) == right, f"step {number} is not {list(one)}; go through it again from step 1"


# ---- an adapter ------------------------------------------------------------------------------------------------------


def check_numbers_of_an_adapter(module):
    """An adapter has rank * (in + out) numbers for each projection."""
    for rank, projections in ((8, [(100, 50)]), (1, [(3, 3)]), (16, [(64, 32), (32, 64), (7, 5)]), (4, [])):
        right = sum(rank * out + rank * inputs for out, inputs in projections)
        found = module.adapter_numbers(rank, projections)
        product = sum(out * inputs for out, inputs in projections)
        hint = ". BA is never stored: only A and B are" if projections and found in (product, rank * product) else ""
        assert found == right, f"adapter_numbers({rank}, {projections}) is {found}, and {right} is right{hint}"


# ---- slots -----------------------------------------------------------------------------------------------------------

VLLM = (
    ("activate", 1, [1, None]), ("activate", 2, [1, 2]), ("activate", 3, [3, 2]), ("deactivate", 2, [3, None]),
    ("activate", 1, [3, 1]), ("deactivate", 3, [None, 1]), ("activate", 2, [2, 1]), ("activate", 3, [2, 3]),
    ("pin", 2, [2, 3]), ("activate", 1, [2, 1]), ("activate", 2, [2, 1]), ("activate", 5, [2, 5]),
)  # fmt: skip
"""What vLLM's own test of its slots does, and three steps more."""


def _acted(slots, action, adapter, after, told):
    found = getattr(slots, action)(adapter)
    assert list(slots.slots) == after, f"{told}: slots are {list(slots.slots)}, and {after} is right"
    if action == "activate":
        right = after.index(adapter)
        assert found == right, f"{told} returns {found!r}, and slot {right} is right"


def check_slots_as_in_vllm(module):
    """The first free slot is used, else the least recently used one not pinned (the sequence of vLLM's test)."""
    slots, told = module.AdapterSlots(2), []
    assert list(slots.slots) == [None, None], f"two slots are {list(slots.slots)} at the beginning"
    for action, adapter, after in VLLM:
        told.append(f"{action}({adapter})")
        _acted(slots, action, adapter, after, ", ".join(told[-4:]))


def check_using_counts_as_use(module):
    """An adapter that has a slot keeps it, and is evicted last from then on."""
    slots = module.AdapterSlots(3)
    for adapter in (4, 5, 6):
        slots.activate(adapter)
    _acted(slots, "activate", 4, [4, 5, 6], "activate 4, 5, 6, 4")
    found = slots.activate(7)
    hint = ": 4 came first, and was used last" if slots.slots[0] == 7 else ""
    assert list(slots.slots) == [4, 7, 6], f"activate 4, 5, 6, 4, 7: {list(slots.slots)}; [4, 7, 6] is right{hint}"
    assert found == 1, f"activate(7) returns {found!r}; slot 1 is right"


def check_all_pinned_is_an_error(module):
    """With all slots pinned, activating another adapter raises MinivllmError; those in slots may still be used."""
    slots = module.AdapterSlots(2)
    slots.pin(1)
    slots.pin(2)
    assert list(slots.slots) == [1, 2], f"pin(1), pin(2): {list(slots.slots)}. Pinning gives a slot"
    assert slots.activate(2) == 1, "activate(2) must return the slot that it has"
    for action in ("activate", "pin"):
        try:
            getattr(slots, action)(3)
        except MinivllmError as error:
            assert list(slots.slots) == [1, 2], f"the refused {action}(3) has changed the slots: {list(slots.slots)}"
            helps = any(word in str(error).lower() for word in ("max_loras", "slot", "pin", "unload", "deactivate"))
            assert helps, f"the error says {str(error)!r}; say what is full, and what would help"
        else:
            raise AssertionError(f"both slots are pinned, and {action}(3) raises nothing: {list(slots.slots)}")


def check_deactivating_unpins(module):
    """Deactivating a pinned adapter empties its slot, and when it comes again it can be evicted."""
    slots = module.AdapterSlots(1)
    slots.pin(1)
    slots.deactivate(1)
    assert list(slots.slots) == [None], f"pin(1), deactivate(1): {list(slots.slots)}"
    slots.activate(1)
    try:
        slots.activate(2)
    except MinivllmError:
        raise AssertionError("pin(1), deactivate(1), activate(1), activate(2): 1 is pinned no more") from None
    slots.deactivate(9)
    assert list(slots.slots) == [2], f"deactivate(9), which has no slot, leaves {list(slots.slots)}"


def check_slots_at_random(module):
    """After each of thousands of actions, the slots are those of a list kept by hand."""
    for seed in range(30):
        draw, size = random.Random(seed), 1 + seed % 5
        slots, places, used, pinned = module.AdapterSlots(size), [None] * size, [], set()
        for count in range(100):
            adapter, action = draw.randint(1, 9), draw.choices(("activate", "deactivate", "pin"), (8, 2, 1))[0]
            if action == "pin" and len(pinned | {adapter}) == size:
                continue
            if action == "deactivate":
                places = [None if one == adapter else one for one in places]
                used, pinned = [one for one in used if one != adapter], pinned - {adapter}
            elif action == "activate" or adapter not in used:
                if adapter not in places:
                    gone = None if None in places else next(one for one in used if one not in pinned)
                    places[places.index(gone)] = adapter
                    used = [one for one in used if one != gone]
                used = [one for one in used if one != adapter] + [adapter]
            if action == "pin":
                pinned.add(adapter)
            _acted(slots, action, adapter, places, f"seed {seed}, action {count}, {action}({adapter})")


# ---- the gate --------------------------------------------------------------------------------------------------------


def _admitted(module, running, waiting, max_loras, places):
    found = module.admit(running, waiting, max_loras, places)
    assert isinstance(found, list), f"admit returns {type(found).__name__}, not a list"
    return found


def _gate(module, cases, hint=""):
    for arguments, right in cases:
        found = _admitted(module, *arguments)
        assert found == right, f"admit{arguments} is {found}, and {right} is right{hint}"


def check_the_gate_counts_who_runs(module):
    """A new adapter needs a slot that no running request uses; an active one needs none."""
    _gate(module, (
        (([1], [2, 3], 1, 8), []), (([1, 1], [1, 2], 1, 8), [0]), (([1, 2], [3, 2, 1], 2, 8), [1, 2]),
        (([], [4], 1, 8), [0]), (([1, 2], [3], 3, 8), [0]), (([5, 5, 5], [6, 6], 2, 8), [0, 1]),
    ))  # fmt: skip


def check_the_gate_passes_over(module):
    """A request that needs a slot too many is passed over, and those behind it are tried."""
    hint = ": a request that waits for a slot must not hold up the others"
    _gate(module, ((([1, 1], [2, 3, 1, 0], 2, 8), [0, 2, 3]), (([1], [2, 1, 1], 1, 8), [1, 2])), hint)


def check_who_starts_takes_a_slot(module):
    """Requests that start in this call count as well."""
    hint = ": the adapters of those that start are active, too"
    _gate(
        module,
        ((([], [1, 2, 3, 1], 2, 8), [0, 1, 3]), (([], [1, 2], 1, 8), [0]), (([7], [8, 9, 8], 2, 8), [0, 2])),
        hint,
    )


def check_the_base_model_needs_no_slot(module):
    """Requests without an adapter pass, and take no slot."""
    hint = ": 0 is the base model"
    _gate(module, (
        (([1], [0, 0], 1, 8), [0, 1]), (([0, 0], [1], 1, 8), [0]), (([], [0, 1, 2], 1, 8), [0, 1]), (([0], [0, 5], 1, 8), [0, 1]),
    ), hint)  # fmt: skip


def check_places(module):
    """No more start than there are seats; a request that is passed over takes none."""
    _gate(module, (
        (([], [1, 1, 1], 1, 2), [0, 1]), (([1], [2, 1, 1, 0], 1, 2), [1, 2]), (([1], [1], 1, 0), []), (([], [], 2, 3), []),
    ))  # fmt: skip


# ---- in the engine ---------------------------------------------------------------------------------------------------


def check_the_engines_scheduler_decides_the_same(module):
    """In 100 random workloads the engine's scheduler takes the same steps with your gate as with its own."""
    for seed in range(100):
        draw = random.Random(seed)
        requests = [
            (str(i), draw.choice([0, 1, 1, 2, 3, 4]), draw.randint(1, 5), draw.randint(0, 4)) for i in range(12)
        ]
        requests.append(("first", 0, 1, 0))
        limits = draw.randint(1, 4), draw.randint(1, 6)
        mine, right = (_steps(requests, *limits, one) for one in (learner_policy(module.admit), DEFAULT_POLICY))
        for step, (one, other) in enumerate(zip(mine, right)):
            where = f"seed {seed}, {limits[0]} slots, {limits[1]} places, step {step}"
            assert one == other, f"{where}: {one} run, and with the engine's gate {other}"
