"""Check exercise 12 and the script that solves it, and run the engine with the learner's slots and gate."""

import random
from functools import lru_cache
from pathlib import Path

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig, Parts, SchedulerConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm_lab.multi_lora.learner_policy import learner_policy
from minivllm_lab.inside import runner_of
from minivllm_lab.kernel_trace import trace_kernel
from minivllm_lab.numbers_made import numbers_made
from minivllm_lab.plugged import PROMPTS, Plugged
from minivllm.platforms.triton_utils import tl, triton

TOLERANCE = 1e-4


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


def _linear(tokens=5, inputs=40, outputs=48, rank=4):
    draw = torch.Generator().manual_seed(rank)
    shapes = (tokens, inputs), (outputs, inputs), (rank, inputs), (outputs, rank)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def check_applied_is_what_merged_gives(module):
    """The result is x times W + BA, whatever the shapes."""
    for shape in ((5, 40, 48, 4), (1, 7, 7, 1), (3, 9, 2, 5)):
        x, weight, a, b = _linear(*shape)
        found, right = module.applied(x, weight, a, b), x.double() @ (weight + b @ a).double().T
        assert found.shape == right.shape, f"shape {list(found.shape)}, not {list(right.shape)}"
        off = float((found.double() - right).abs().max())
        alone = float((found.double() - (x @ weight.T).double()).abs().max())
        hint = ": the adapter is left out" if alone < TOLERANCE else ""
        assert off < TOLERANCE, f"off by {off:.2g} for (tokens, in, out, rank) = {shape}{hint}"


def check_BA_is_never_made(module):
    """Everything made on the way is smaller than W, row by row too: two small matmuls, one after the other."""
    x, weight, a, b = _linear()
    made = numbers_made(lambda: module.applied(x, weight, a, b))
    assert made < weight.numel(), f"{made:,} numbers are made on the way, and W has {weight.numel():,}"


# ---- one forward for many --------------------------------------------------------------------------------------------

BATCHES = (
    [2, 0, -1, 2, 0, 2], [0], [-1, -1, 3], [5, 4, 3, 2, 1, 0], [1] * 9, [-1, 7, -1, 7, 0],
    [slot for token in range(40) for slot in (token * 7 % 5 - 1,)],
)  # fmt: skip


def _groups(slots):
    order = [token for slot in sorted(set(slots) - {-1}) for token, its in enumerate(slots) if its == slot]
    active = sorted(set(slots) - {-1})
    starts = [0]
    for slot in active:
        starts.append(starts[-1] + slots.count(slot))
    return order, active, starts


def _grouped(module, slots):
    given = torch.tensor(slots, dtype=torch.int32)
    found = module.group_tokens(given)
    assert given.tolist() == slots, f"token_slots was {slots}, and is {given.tolist()} after the call"
    assert isinstance(found, tuple) and len(found) == 3, "it returns three tensors: order, active, starts"
    for name, one in zip(("order", "active", "starts"), found):
        assert isinstance(one, torch.Tensor), f"{name} is {type(one).__name__}, not a tensor"
        assert one.dtype == torch.int32, f"{name} has {one.dtype}, not torch.int32"
    return [one.tolist() for one in found]


def check_tokens_are_grouped(module):
    """Tokens are ordered by slot, without those that have none; the slots in use and where each begins are right."""
    for slots in BATCHES:
        order, active, starts = _grouped(module, slots)
        right = _groups(slots)
        assert active == right[1], f"of {slots} the slots {active} are active; {right[1]} is right"
        assert starts == right[2], f"of {slots} starts is {starts}; {right[2]} is right"
        assert sorted(order) == sorted(right[0]), f"of {slots} order is {order}; {right[0]} is right"
        by_slot = [slots[token] for token in order]
        assert by_slot == sorted(by_slot), f"of {slots} order is {order}, whose slots are {by_slot}: sort by slot"


def check_the_order_is_stable(module):
    """Tokens of one slot stay in their order in the batch."""
    slots = [token % 3 for token in range(200)]
    order = _grouped(module, slots)[0]
    assert order == _groups(slots)[0], "of 200 tokens of three slots, those of one slot are out of order"


def check_nobody_has_an_adapter(module):
    """Without any adapter there are no groups, and so no launch."""
    for slots in ([-1, -1, -1], [-1]):
        found = _grouped(module, slots)
        assert found == [[], [], [0]], f"of {slots}: {found}; [[], [], [0]] is right"


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


# ---- the kernels -----------------------------------------------------------------------------------------------------

SLOTS = [2, 0, -1, 2, 2, 0, 2, 2, -1, 2]
IN, OUT, MAX_RANK, RANKS, TILE, BLOCK = 22, 19, 5, 8, 4, 8
SIZES = {"MAX_RANK": MAX_RANK, "RANKS": RANKS, "TILE": TILE, "BLOCK": BLOCK}


@triton.jit
def _rows_kernel(tokens, valid, order, starts, group, ROWS: tl.constexpr, TILE: tl.constexpr):
    which, tile = tl.load(group), tl.program_id(0)
    token, there = ROWS(order, starts, which, tile, TILE)
    at = tile * TILE + tl.arange(0, TILE)
    tl.store(tokens + at, token)
    tl.store(valid + at, there.to(tl.int32))


def _clean(trace):
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Do rows and columns that are not there have a mask?"


def _tensors(slots=SLOTS):
    return [torch.tensor(one, dtype=torch.int32) for one in _groups(list(slots))]


def check_rows_of_a_tile(module):
    """Stretch: a tile has the tokens of its group, and no token of the next one."""
    order, active, starts = _tensors()
    for group, tiles in ((0, 2), (1, 3)):
        tokens, valid = (torch.full((tiles * TILE,), -7, dtype=torch.int64) for _ in range(2))
        arguments = tokens, valid, order, starts, torch.tensor([group], dtype=torch.int32)
        trace = trace_kernel(_rows_kernel, (tiles,), *arguments, ROWS=module.rows_of_tile, TILE=TILE)
        _clean(trace)
        its = order[starts[group] : starts[group + 1]].tolist()
        right = its + [0] * (tiles * TILE - len(its))
        found = [bool(one) for one in valid.tolist()]
        wanted = [place < len(its) for place in range(tiles * TILE)]
        hint = ": those of the next group" if found[: len(wanted)] != wanted and sum(found) > len(its) else ""
        assert found == wanted, f"group {group}: there are {found}, and {wanted} is right{hint}"
        assert tokens.tolist() == right, f"group {group}: tokens {tokens.tolist()}, and {right} is right"


@lru_cache(maxsize=1)
def _case():
    draw = torch.Generator().manual_seed(0)
    x, a = torch.randn(len(SLOTS), IN, generator=draw), torch.randn(4, MAX_RANK, IN, generator=draw)
    b, out = torch.randn(4, OUT, MAX_RANK, generator=draw), torch.randn(len(SLOTS), OUT, generator=draw)
    return x, a, b, out


def _with(slots):
    return [token for token, slot in enumerate(slots) if slot >= 0]


def check_shrink(module):
    """Stretch: every token gets A of its own slot; tokens without an adapter are not touched."""
    x, a, _, _ = _case()
    small = torch.full((len(SLOTS), MAX_RANK), float("nan"))
    trace = trace_kernel(module.shrink_kernel, (2, 2), small, x, a, *_tensors(), IN, **SIZES)
    _clean(trace)
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            assert small[token].isnan().all(), f"token {token} has no adapter, and its row is written"
            continue
        right = a[slot].double() @ x[token].double()
        assert not small[token].isnan().any(), f"token {token}: its row, or a rank of it, is not written"
        off = float((small[token].double() - right).abs().max())
        other = [one for one in (0, 1, 2, 3) if (a[one].double() @ x[token].double() - small[token]).abs().max() < 1e-4]
        hint = f": that is slot {other[0]}, and the token's is {slot}" if other else ""
        assert off < TOLERANCE, f"token {token} is off by {off:.2g}{hint}"


def check_expand(module):
    """Stretch: B's result is added to the base model's output, in all columns, and only for tokens with an adapter."""
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float16, 2e-2)):
        _expands(module, dtype, tolerance)


def _expands(module, dtype, tolerance):
    """Check with `b` and `out` of this type; `small` is float32."""
    _, _, b, before = (one.to(dtype) for one in _case())
    small = torch.randn(len(SLOTS), MAX_RANK, generator=torch.Generator().manual_seed(1))
    out = before.clone()
    trace = trace_kernel(module.expand_kernel, (2, 2, -(-OUT // BLOCK)), out, small, b, *_tensors(), OUT, **SIZES)
    _clean(trace)
    for token, slot in enumerate(SLOTS):
        more = b[slot].double() @ small[token].double() if slot >= 0 else torch.zeros(OUT, dtype=torch.float64)
        off = (out[token].double() - before[token] - more).abs()
        hint = ": what `out` held is gone" if (out[token].double() - more).abs().max() < tolerance else ""
        hint = hint or (": it has no adapter" if slot < 0 else "")
        where = f"b and out of {str(dtype).removeprefix('torch.')}: token {token}, column {int(off.argmax())}"
        assert float(off.max()) < tolerance, f"{where}: off by {float(off.max()):.2g}{hint}"


def check_an_adapter_is_read_once_a_tile(module):
    """Stretch: tiles that their group does not reach read no adapter, and each other tile reads it once."""
    x, a, b, before = _case()
    order, active, starts = _tensors()
    tiles = sum(-(-int(count) // TILE) for count in starts.diff())
    small, out = torch.zeros(len(SLOTS), MAX_RANK), before.clone()
    down = trace_kernel(module.shrink_kernel, (3, 2), small, x, a, order, active, starts, IN, **SIZES)
    grid = (3, 2, -(-OUT // BLOCK))
    up = trace_kernel(module.expand_kernel, grid, out, small, b, order, active, starts, OUT, **SIZES)
    for trace, name, size in ((down, "a", 4 * MAX_RANK * IN), (up, "b", 4 * MAX_RANK * OUT)):
        read, right = trace.arguments[name].bytes_read, tiles * size
        hint = ". Does a tile without a token read?" if read > right else ""
        assert read == right, f"{read:,} bytes of {name} are read, and {right:,} are right{hint}"
    read, right = down.arguments["x"].bytes_read, 4 * IN * len(_with(SLOTS))
    assert read == right, f"{read:,} bytes of x are read, and {right:,} are right: once for each token with an adapter"
    written = up.arguments["out"].bytes_written
    assert written == 4 * OUT * len(_with(SLOTS)), f"{written:,} bytes of out are written"


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


ADAPTERS = Path(EMBEDDED_MODEL).parent / "adapters"
TRAINED = ("braces", "doctest", "stubs")


def _copied(llm):
    """Count the copies of adapters into slots, and list the slots at the end."""
    manager = runner_of(llm).lora.manager
    return {"copies into slots": manager.num_activations, "slots at the end": str(list(manager.slots.slots))}


def plug(module) -> Plugged:
    """Use the learner's slots and gate: three adapters and the base model, two slots, three seats."""
    adapters = [LoRARequest(name, number, str(ADAPTERS / name)) for number, name in enumerate(TRAINED, start=1)]
    wanted = [adapters[0], adapters[1], adapters[2], adapters[0], None, adapters[1], adapters[2], adapters[0]]
    return Plugged(
        parts=Parts(policy=learner_policy(module.admit), lora_slots=module.AdapterSlots),
        engine_args={
            "enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 3, "max_num_seqs": 3,
        },
        prompts=(*PROMPTS, *PROMPTS),
        adapters=wanted,
        says=_copied,
    )  # fmt: skip
