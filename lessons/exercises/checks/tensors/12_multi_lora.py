"""Check the part of exercise 12 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

from functools import lru_cache
from pathlib import Path

import torch

from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.core.lora_request import LoRARequest
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.engines.inside import runner_of
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.multi_lora.learner_policy import learner_policy
from minivllm_lab.checks.numbers_made import numbers_made
from minivllm_lab.checks.plugged import PROMPTS, Plugged

TOLERANCE = 1e-4


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
