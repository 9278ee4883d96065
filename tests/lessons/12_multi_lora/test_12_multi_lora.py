"""Lesson 12: its kernels are right, its slots and its gate are the engine's, its exercise
catches mistakes.
"""

import itertools
import math
import random
from collections import Counter

import pytest
import torch
from kernels.harness import assert_close, assert_compiles
from lessons.harness import REPOSITORY, assert_refuses, exercise_test, figures_of_quick_run, script_path

from minivllm.config import NO_PARTS
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.errors import MinivllmError
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.memory.adapters import linear_shapes
from minivllm_lab.exercise import checks_of, load, plug_of
from minivllm_lab.multi_lora import report
from minivllm_lab.multi_lora.learner_policy import learner_policy
from minivllm_lab.plugged import rows_of, serve
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory.adapters import adapter_parameters

lesson = load(script_path("12"))
WAYS = {"loop": lesson.by_loop, "bgmv": lesson.by_token, "sgmv": lesson.by_segment, "sorted": lesson.by_sorting}
PAGE = REPOSITORY / "lessons" / "12_multi_lora.md"

# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", report.AWKWARD)
def test_every_way_is_right(name, way, device):
    torch.manual_seed(len(name))
    case = report.lora_case(*report.AWKWARD[name], torch.float32)
    expected = report.exact(case)
    fresh = {key: tensor.clone().to(device) for key, tensor in case.items()}
    WAYS[way](**fresh)
    assert_close(fresh["out"], expected)
    without = [token for token, slot in enumerate(case["token_slots"].tolist()) if slot < 0]
    assert torch.equal(fresh["out"][without].cpu(), case["out"][without])


def test_without_adapters_nothing_is_launched():
    case = report.lora_case([-1, -1, -1], 8, 16, 16, torch.float32)
    before = case["out"].clone()
    for way in WAYS.values():
        way(**case, launch=None)
    assert torch.equal(case["out"], before)


@pytest.mark.interpreted
@pytest.mark.parametrize(("slots", "tiles"), [([0] * 16, 1), ([0] * 17, 2), ([3, -1, 1, 3] * 5, 2)])
def test_an_adapter_is_read_once_a_tile_without_races(slots, tiles):
    case = report.lora_case(slots, 8, 40, 72, torch.float32)
    down, up = report.traced(lesson.by_sorting, case)
    assert not down.races + down.out_of_bounds + up.races + up.out_of_bounds
    assert down.arguments["a"].bytes_read == tiles * 4 * 8 * 40
    assert up.arguments["b"].bytes_read == tiles * 4 * 8 * 72
    tokens = sum(slot >= 0 for slot in slots)
    assert (down.arguments["x"].bytes_read, down.bytes_written) == (4 * 40 * tokens, 4 * 8 * tokens)
    assert up.bytes_written == up.arguments["out"].bytes_read == 4 * 72 * tokens


@pytest.mark.parametrize("rank", [16, 64])
def test_the_kernels_compile(rank):
    """They compile for Llama-3's hidden size, with matrix instructions and wide loads."""
    numbers, small = torch.zeros(8, 4096).bfloat16(), torch.zeros(8, rank)
    ints = torch.zeros(16, dtype=torch.int32)
    groups = {"order": ints, "active": ints, "starts": ints}
    sizes = {"MAX_RANK": rank, "RANKS": rank, "TILE": lesson.TILE, "BLOCK": lesson.BLOCK}
    assert_compiles(
        lesson.shrink_kernel, {"small": small, "x": numbers, "a": numbers, **groups, "IN": 4096, **sizes},
        tensor_core=True, load_bytes=8,
    )  # fmt: skip
    assert_compiles(
        lesson.expand_kernel, {"out": numbers, "small": small, "b": numbers, **groups, "OUT": 4096, **sizes},
        tensor_core=True,
    )  # fmt: skip


# ---- lesson form and engine form -----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", pytest.param("triton", marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("name", report.AWKWARD)
def test_the_kernels_agree_with_the_engines(name, backend):
    token_slots, *shape = report.AWKWARD[name]
    torch.manual_seed(len(name))
    case = report.lora_case(token_slots, *shape, torch.float32)
    engine_out = case["out"].clone()
    report.engine_call(engine_out, *(case[key] for key in ("x", "a", "b", "token_slots")), backend=backend)()
    lesson.by_sorting(**case)
    assert_close(engine_out, case["out"].double())


def test_the_groups_are_the_engines():
    for seed in range(40):
        draw = random.Random(seed)
        slots = torch.tensor([draw.randint(-1, 4) for _ in range(draw.randint(1, 40))], dtype=torch.int32)
        order, active, starts = (numbers.tolist() for numbers in lesson.group_tokens(slots))
        meta = LoRAKernelMeta(40, 5, torch.device("cpu"))
        meta.prepare(slots.numpy())
        first = int((slots < 0).sum())
        assert meta.indices[first : len(slots)].tolist() == order
        assert meta.active[: meta.num_active].tolist() == active
        assert [start - first for start in meta.starts[: meta.num_active].tolist()] == starts[:-1]
        assert meta.counts[: meta.num_active].tolist() == [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.interpreted
def test_the_engines_kernels_stop_at_a_slots_own_rank_and_the_lessons_do_not():
    """The ranks beyond a slot's 3 of 8 hold NaN, which shows if they are read."""
    case = report.lora_case([0, 1, 0], 8, 16, 16, torch.float32)
    case["a"][:, 3:], case["b"][:, :, 3:] = math.nan, math.nan
    x, a, b, slots = (case[key] for key in ("x", "a", "b", "token_slots"))
    for backend in ("cpu", "triton"):
        out = case["out"].clone()
        report.engine_call(out, x, a, b, slots, rank=3, backend=backend)()
        assert_close(out, report.exact({**case, "a": a[:, :3], "b": b[:, :, :3]}))
    lesson.by_sorting(**case)
    assert case["out"].isnan().all()


def outcome(slots, action: str, adapter: int) -> object:
    """Return the slot that `activate` returns, or "refused"."""
    try:
        slot = getattr(slots, action)(adapter)
    except MinivllmError:
        return "refused"
    return slot if action == "activate" else None


def test_slots_are_the_engines():
    """Random activations, removals and pins give the same adapter in each slot, and the same
    refusals.
    """
    refused = 0
    for seed in range(40):
        draw, size = random.Random(seed), 1 + seed % 4
        ours, engine = lesson.AdapterSlots(size), AdapterSlots(size)
        for _ in range(80):
            action, adapter = draw.choices(("activate", "deactivate", "pin"), (8, 3, 1))[0], draw.randint(1, 7)
            ended = outcome(ours, action, adapter)
            assert ended == outcome(engine, action, adapter)
            assert ours.slots == list(engine.slots)
            refused += ended == "refused"
    assert refused > 20


# ---- weight, merged and applied ------------------------------------------------------------------


def test_numbers_are_counted_as_the_engine_counts_them():
    for name in ("Llama-3.1-8B", "Llama-3.1-70B"):
        model = known_model(name)
        for rank in report.RANKS:
            counted = model.num_hidden_layers * lesson.adapter_numbers(rank, linear_shapes(model).values())
            assert counted == adapter_parameters(model, rank)


def test_the_example_by_hand():
    """Follow the text's example of W, A and B, and of its groups."""
    weight, x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    a, b = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0], [3.0]])
    assert (b @ a).tolist() == [[1.0, 0.0, 2.0], [3.0, 0.0, 6.0]]
    assert (x @ a.T).tolist() == [[3.0]]
    assert lesson.applied(x, weight, a, b).tolist() == [[4.0, 10.0]]
    assert (x @ lesson.merged(weight, a, b).T).tolist() == [[4.0, 10.0]]
    groups = lesson.group_tokens(torch.tensor([2, 0, -1, 2, 0, 2], dtype=torch.int32))
    assert [numbers.tolist() for numbers in groups] == [[1, 4, 0, 3, 5], [0, 2], [0, 2, 5]]


# ---- slots and gate ------------------------------------------------------------------------------


def requests_of(seed):
    draw = random.Random(seed)
    work = [(str(i), draw.choice([0, 1, 1, 2, 3, 4]), draw.randint(1, 5), draw.randint(0, 4)) for i in range(12)]
    return [("first", 0, 1, 0), *work], (draw.randint(1, 4), draw.randint(1, 6))


engine_steps = next(check for check in checks_of("12") if check.__name__ == "check_prediction").__globals__["_steps"]


def test_the_steps_are_the_engines():
    """The lesson's `serve` and the engine's scheduler run the same requests in each step."""
    for seed in range(30):
        work, limits = requests_of(seed)
        steps = lesson.serve([lesson.Request(*each) for each in work], *limits)
        ours = [[request.name for request in running] for running, _ in steps]
        expected = engine_steps(work, *limits)
        assert ours == expected[: len(ours)], seed
        assert not any(expected[len(ours) :])


def test_no_step_has_more_adapters_than_slots_and_all_are_served():
    for seed in range(25):
        work, (slots, seats) = requests_of(seed)
        served = Counter()
        for running, _ in lesson.serve([lesson.Request(*each) for each in work], slots, seats):
            assert len({request.adapter for request in running} - {0}) <= slots
            assert len(running) <= seats
            served.update(request.name for request in running)
        assert served == {name: runs for name, _, runs, _ in work}


def test_tiers_by_hand():
    """Two slots above a host tier of three: count what is copied, and what is read from disk."""
    batches = [[1, 2, 0], [1, 2], [3], [1], [4], [2]]
    # slots: 1 2 | 1 2 | 3 2 | 3 1 | 4 1 | 4 2, where 1 is evicted; host: 1 2 3, then 4 evicts 2
    assert lesson.tiers(batches, 2, 3) == Counter({"used": 8, "copied": 6, "from disk": 5})
    assert lesson.tiers(batches, 4, 4) == Counter({"used": 8, "copied": 4, "from disk": 4})


def test_what_leaves_the_host_leaves_its_slot():
    assert lesson.tiers([[1], [2], [3], [1]], 3, 3)["copied"] == 3
    assert lesson.tiers([[1], [2], [3], [4], [1]], 4, 3) == Counter({"used": 5, "copied": 5, "from disk": 5})


@pytest.mark.parametrize(
    ("admit", "about"),
    [
        (lambda *_: None, "your admit returns None"),
        (lambda running, waiting, *_: [len(waiting)], "a list of indices into"),
        (lambda running, waiting, *_: [0, 0], "seats for"),
        (lambda running, waiting, *_: list(range(len(waiting))), "different adapters run, but there are 1 slots"),
    ],
)
def test_a_gate_that_cannot_be_is_one_line(admit, about):
    with pytest.raises(MinivllmError, match=about):
        engine_steps([("a", 1, 2, 0), ("b", 2, 2, 0)], 1, 4, learner_policy(admit))


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("12", tmp_path)
    assert figures["weighs"]["Llama-3.1-8B"]["16"] == 83_886_080
    counted = figures["counted"]
    assert counted["loop"]["four"] == {"launches": 8, "adapters_read": 4}
    assert counted["bgmv"]["one adapter"] == {"launches": 2, "adapters_read": 16}
    assert counted["sorted"]["four"] == counted["sgmv"]["four"] == {"launches": 2, "adapters_read": 4}
    assert [name for name, record in counted.items() if record["rows_copied"]] == ["sgmv"]
    for record in figures["thousand"]["adapters"].values():
        assert record["read"] == record["wanted"] <= record["copied"]
    assert figures["thousand"]["adapters"]["64"]["distinct"] > figures["thousand"]["adapters"]["8"]["distinct"] > 1
    texts = figures["answers"]
    assert len(set(texts.values())) == len(texts) == 4
    shared = figures["shared"]
    assert shared["unchanged"]["cached"] == 0 < shared["hashes ignore the adapter"]["cached"]
    assert shared["unchanged"]["text"] == texts["doctest"] != shared["hashes ignore the adapter"]["text"]
    slots = figures["slots"]
    assert slots["1"]["waiting"] > slots["4"]["waiting"] > slots["16"]["waiting"] == 0
    assert slots["cold"]["starts"] > 100 > slots["cold"]["with_a_third_slot"] == 4
    assert [record["real"] for record in figures["ranks"].values()] == [1.0, 0.03125]


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--adapters", "7"), "--adapters: must be from 8 to 5000"),
        (("--skew", "-1"), "--skew: must be a number from 0 to 3"),
        (("--skew", "much"), "--skew: must be a number from 0 to 3"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)


def test_the_engine_runs_with_the_learners_slots_and_gate():
    plugged = plug_of("12")(lesson)
    ours, yours = serve(plugged, NO_PARTS), serve(plugged, plugged.parts)
    assert yours.token_ids == ours.token_ids
    counted = [{name: value for name, value in rows_of(run).items() if "second" not in name} for run in (ours, yours)]
    assert counted[0] == counted[1]
    assert "None" not in rows_of(yours)["slots at the end"]


def test_no_answer_of_the_exercise_stands_before_it():
    before = PAGE.read_text().partition("## Build it")[0]
    assert "@triton.jit" not in before
    for name in ("adapter_numbers", "applied", "group_tokens", "admit", "activate", "deactivate", "pin"):
        assert f"def {name}(" not in before


# ---- the exercise --------------------------------------------------------------------------------

NUMBERS, GROUP, ADMIT = "adapter_numbers", "group_tokens", "admit"
ACTIVATE, DEACTIVATE, PIN = "AdapterSlots.activate", "AdapterSlots.deactivate", "AdapterSlots.pin"
OLDEST, ROWS, SHRINK, EXPAND = "AdapterSlots._least_recently_used", "rows_of_tile", "shrink_kernel", "expand_kernel"
SUM = "rank * (outputs + inputs)"
APPLIED = "x @ weight.T + (x @ a.T) @ b.T"
MAY = "adapter == 0 or adapter in active or len(active) < max_loras"
AT_A = "(slot * MAX_RANK + rank[:, None]) * IN + column[None, :]"
LOAD_A = "tl.load(a + at, mask=(rank < MAX_RANK)[:, None] & inside, other=0.0)"
LOAD_X = "tl.load(x + token[:, None] * IN + column[None, :], mask=there[:, None] & inside, other=0.0)"
STORE_S = "tl.store(small + at, sums, mask=there[:, None] & (rank < MAX_RANK)[None, :])"
LOAD_B = "tl.load(b + (slot * OUT + column[:, None]) * MAX_RANK + rank[None, :], mask=inside & real, other=0.0)"
OLD_OUT = "tl.load(at, mask=mask, other=0.0).to(tl.float32)"
MASK_OUT = "there[:, None] & (column < OUT)[None, :]"
ON_PAPER = "serve(requests, max_loras=2, max_num_seqs=3)"
SORTED = "torch.argsort(token_slots, stable=True)"
STARTS = "torch.cat([counts.new_zeros(1), counts.cumsum(0)])"
PLACE = "first + tile * TILE + tl.arange(0, TILE)"

MUTANTS = {
    # on paper
    "on paper: three slots": ("first_steps", ON_PAPER, "serve(requests, max_loras=3, max_num_seqs=3)"),
    "on paper: one slot": ("first_steps", ON_PAPER, "serve(requests, max_loras=1, max_num_seqs=3)"),
    "on paper: four seats": ("first_steps", ON_PAPER, "serve(requests, max_loras=2, max_num_seqs=4)"),
    "on paper: the base model has a number": ("first_steps", "Request('D', 0, 1)", "Request('D', 4, 1)"),
    # an adapter
    "numbers: BA": (NUMBERS, SUM, "outputs * inputs"),
    "numbers: A alone": (NUMBERS, SUM, "rank * inputs"),
    "numbers: rank twice": (NUMBERS, SUM, "rank * rank * (outputs + inputs)"),
    "numbers: one of each": (NUMBERS, SUM, "outputs + inputs"),
    "applied: BA is made": ("applied", APPLIED, "x @ weight.T + x @ (b @ a).T"),
    "applied: merged on the way": ("applied", APPLIED, "x @ (weight + b @ a).T"),
    "applied: BA row by row": (
        "applied",
        f"return {APPLIED}",
        "return torch.stack([x @ (row + its @ a) for row, its in zip(weight, b)], dim=1)",
    ),
    "applied: BA in numpy": (
        "applied",
        f"return {APPLIED}",
        "return torch.from_numpy(x.numpy() @ (weight.numpy() + b.numpy() @ a.numpy()).T)",
    ),
    "applied: the adapter alone": ("applied", APPLIED, "(x @ a.T) @ b.T"),
    "applied: the base alone": ("applied", APPLIED, "x @ weight.T"),
    "applied: taken off": ("applied", APPLIED, "x @ weight.T - (x @ a.T) @ b.T"),
    # group_tokens
    "group: unstable": (GROUP, SORTED, "torch.argsort(-token_slots).flip(0)"),
    "group: spoils its argument": (GROUP, "return ...", "found = ...\ntoken_slots[token_slots < 0] = 99\nreturn found"),
    "group: as they came": (GROUP, SORTED, "torch.arange(len(token_slots))"),
    "group: from the last slot on": (GROUP, SORTED, "torch.argsort(token_slots, descending=True, stable=True)"),
    "group: the base model is a group": (GROUP, "token_slots[order] >= 0", "token_slots[order] >= -1"),
    "group: slot 0 is none": (GROUP, "token_slots[order] >= 0", "token_slots[order] > 0"),
    "group: slots, not tokens": (GROUP, "order.int()", "token_slots[order]"),
    "group: starts without the end": (GROUP, STARTS, "counts.cumsum(0) - counts"),
    "group: starts without the zero": (GROUP, STARTS, "counts.cumsum(0)"),
    "group: counts, not starts": (GROUP, STARTS, "torch.cat([counts.new_zeros(1), counts])"),
    "group: int64": (GROUP, "order.int()", "order"),
    "group: all slots are active": (GROUP, "active.int()", "torch.arange(len(active)).int()"),
    # slots
    "slots: first come, first gone": (ACTIVATE, "self._used.pop(adapter, None)", ""),
    "slots: the newest goes": (
        OLDEST,
        "for adapter in self._used: ...",
        """
for adapter in reversed(self._used):
    if adapter not in self.pinned:
        return adapter
""",
    ),
    "slots: the last free one": (
        ACTIVATE,
        "self.slots[self.slots.index(None)] = adapter",
        "self.slots[len(self.slots) - 1 - self.slots[::-1].index(None)] = adapter",
    ),
    "slots: a new one each time": (ACTIVATE, "adapter not in self._used", "True"),
    "slots: pushed out though one is free": (ACTIVATE, "None not in self.slots", "self._used"),
    "slots: returns the adapter": (ACTIVATE, "return self.slots.index(adapter)", "return adapter"),
    "slots: nobody goes": (ACTIVATE, "if None not in self.slots: ...", ""),
    "slots: pinned ones go": (OLDEST, "adapter not in self.pinned", "True"),
    "slots: all pinned is another error": (OLDEST, "raise ...", "raise RuntimeError('full')"),
    "slots: an error without words": (OLDEST, "raise ...", "raise MinivllmError('')"),
    "slots: all pinned, and one goes": (OLDEST, "raise ...", "return next(iter(self._used))"),
    "slots: deactivated, and still there": (DEACTIVATE, "self.slots[self.slots.index(adapter)] = None", ""),
    "slots: deactivated, and still remembered": (DEACTIVATE, "del self._used[adapter]", ""),
    "slots: deactivated, and still pinned": (DEACTIVATE, "self.pinned.discard(adapter)", ""),
    "slots: deactivating a stranger": (DEACTIVATE, "adapter in self._used", "True"),
    "slots: others move up": (
        DEACTIVATE,
        "self.slots[self.slots.index(adapter)] = None",
        "self.slots.remove(adapter); self.slots.append(None)",
    ),
    "slots: pinning gives no slot": (PIN, "if adapter not in self._used: ...", ""),
    "slots: pinning does nothing": (PIN, "self.pinned.add(adapter)", ""),
    # the gate
    "gate: holds the line": (ADMIT, "len(admitted) == seats", "len(admitted) == seats or len(admitted) < index"),
    "gate: no gate": (ADMIT, MAY, "True"),
    "gate: the base model needs a slot": (ADMIT, MAY, "adapter in active or len(active) < max_loras"),
    "gate: who is active needs another": (ADMIT, MAY, "adapter == 0 or len(active) < max_loras"),
    "gate: one slot too few": (ADMIT, "len(active) < max_loras", "len(active) < max_loras - 1"),
    "gate: one slot too many": (ADMIT, "len(active) < max_loras", "len(active) <= max_loras"),
    "gate: who runs does not count": (ADMIT, "set(running) - {0}", "set()"),
    "gate: the base model is active": (ADMIT, "set(running) - {0}", "set(running)"),
    "gate: requests, not adapters": (ADMIT, "len(active) < max_loras", "len(running) < max_loras"),
    "gate: who starts does not count": (ADMIT, "active |= {adapter} - {0}", ""),
    "gate: the base model becomes active": (ADMIT, "active |= {adapter} - {0}", "active |= {adapter}"),
    "gate: more than there are seats": (ADMIT, "if len(admitted) == seats: ...", ""),
    "gate: who is passed over takes a seat": (ADMIT, "len(admitted) == seats", "index == seats"),
    "gate: adapters, not indices": (ADMIT, "admitted.append(index)", "admitted.append(adapter)"),
    # the kernels
    "rows: into the next group": (
        ROWS,
        "tl.load(order + place, mask=place < last, other=0).to(tl.int64), place < last",
        "tl.load(order + place, mask=place < tl.load(starts + 2), other=0).to(tl.int64), place < tl.load(starts + 2)",
    ),
    "rows: always the first tile": (ROWS, PLACE, "first + tl.arange(0, TILE)"),
    "rows: groups of equal size": (ROWS, PLACE, "group * TILE + tile * TILE + tl.arange(0, TILE)"),
    "rows: places, not tokens": (
        ROWS,
        "tl.load(order + place, mask=place < last, other=0).to(tl.int64)",
        "place.to(tl.int64)",
    ),
    "shrink: the group is the slot": (SHRINK, "tl.load(active + group).to(tl.int64)", "group.to(tl.int64)"),
    "shrink: the first slot": (SHRINK, AT_A, "rank[:, None] * IN + column[None, :]"),
    "shrink: idle tiles read": (SHRINK, "tl.sum(there.to(tl.int32)) > 0", "tl.sum(there.to(tl.int32)) >= 0"),
    "shrink: ranks that are not there are read": (
        SHRINK,
        LOAD_A,
        "tl.load(a + at, mask=(rank < RANKS)[:, None] & inside, other=0.0)",
    ),
    "shrink: the next row's columns of A": (
        SHRINK,
        LOAD_A,
        "tl.load(a + at, mask=(rank < MAX_RANK)[:, None], other=0.0)",
    ),
    "shrink: the next row's columns": (
        SHRINK,
        LOAD_X,
        "tl.load(x + token[:, None] * IN + column[None, :], mask=there[:, None], other=0.0)",
    ),
    "shrink: rows that are not there": (
        SHRINK,
        LOAD_X,
        "tl.load(x + token[:, None] * IN + column[None, :], mask=inside, other=0.0)",
    ),
    "shrink: the first columns only": (SHRINK, "range(0, IN, BLOCK)", "range(0, BLOCK, BLOCK)"),
    "shrink: whole blocks only": (SHRINK, "range(0, IN, BLOCK)", "range(0, IN // BLOCK * BLOCK, BLOCK)"),
    "shrink: the last columns only": (
        SHRINK,
        "tl.dot(rows, tl.trans(down), sums, input_precision='ieee')",
        "tl.dot(rows, tl.trans(down), input_precision='ieee')",
    ),
    "shrink: row 0 is overwritten": (SHRINK, STORE_S, "tl.store(small + at, sums, mask=(rank < MAX_RANK)[None, :])"),
    "shrink: the next token's ranks are overwritten": (
        SHRINK,
        STORE_S,
        "tl.store(small + at, sums, mask=there[:, None] & (rank < RANKS)[None, :])",
    ),
    "expand: the group is the slot": (EXPAND, "tl.load(active + group).to(tl.int64)", "group.to(tl.int64)"),
    "expand: the base output is lost": (EXPAND, OLD_OUT, "tl.zeros([TILE, BLOCK], tl.float32)"),
    "expand: idle tiles read": (EXPAND, "tl.sum(there.to(tl.int32)) > 0", "tl.sum(there.to(tl.int32)) >= 0"),
    "expand: the first columns only": (EXPAND, "tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)", "tl.arange(0, BLOCK)"),
    "expand: row 0 gets it too": (EXPAND, MASK_OUT, "(token >= 0)[:, None] & (column < OUT)[None, :]"),
    "expand: the next row's columns": (EXPAND, MASK_OUT, "there[:, None] & (column >= 0)[None, :]"),
    "expand: the next slot's rows": (
        EXPAND,
        LOAD_B,
        "tl.load(b + (slot * OUT + column[:, None]) * MAX_RANK + rank[None, :], mask=real, other=0.0)",
    ),
    "expand: B lies the other way round": (
        EXPAND,
        LOAD_B,
        "tl.load(b + slot * OUT * MAX_RANK + rank[None, :] * OUT + column[:, None], mask=inside & real, other=0.0)",
    ),
    "expand: two types in a matmul": (EXPAND, "rows.to(up.dtype)", "rows"),
    "expand: ranks that are not there": (EXPAND, "(rank < MAX_RANK)[None, :]", "(rank < RANKS)[None, :]"),
}

MESSAGES = {
    "numbers: BA": "BA is never stored",
    "applied: the base alone": "the adapter is left out",
    "applied: BA is made": "and W has",
    "group: unstable": "out of order",
    "slots: first come, first gone": "was used last",
    "slots: pinning gives no slot": "Pinning gives a slot",
    "gate: holds the line": "must not hold up the others",
    "gate: the base model needs a slot": "0 is the base model",
    "gate: who starts does not count": "are active, too",
    "shrink: the group is the slot": "and the token's is",
    "shrink: idle tiles read": "Does a tile without a token read",
    "expand: the base output is lost": "what `out` held is gone",
    "rows: into the next group": "those of the next group",
}
"""A part of a check's message for the usual mistakes."""


test_the_checks_catch = exercise_test("12", MUTANTS, MESSAGES)
