"""Lesson 12: its kernels are right, its slots and its gate are the engine's, its exercise
catches mistakes.
"""

import math
import random
from collections import Counter

import pytest
import torch
from kernels.harness import assert_close, assert_compiles
from lessons.harness import exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm.memory.adapters import linear_shapes
from minivllm_lab.exercise import checks_of, load
from minivllm_lab.multi_lora import report, ways
from minivllm_lab.multi_lora.learner_policy import learner_policy
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory.adapters import adapter_parameters

lesson = load(script_path("12"))
WAYS = {"loop": lesson.by_loop, "bgmv": lesson.by_token, "sgmv": lesson.by_segment, "sorted": lesson.by_sorting}

# ---- the kernels ---------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    assert ways.verify_kernels(WAYS, device, quick=False)["largest_error"] < 2e-2


def test_without_adapters_nothing_is_launched():
    case = ways.lora_case([-1, -1, -1], 8, 16, 16, torch.float32)
    before = case["out"].clone()
    for way in WAYS.values():
        way(**case, launch=None)
    assert torch.equal(case["out"], before)


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


@pytest.mark.interpreted
def test_the_engines_kernels_stop_at_a_slots_own_rank_and_the_lessons_do_not():
    """The ranks beyond a slot's 3 of 8 hold NaN, which shows if they are read."""
    case = ways.lora_case([0, 1, 0], 8, 16, 16, torch.float32)
    case["a"][:, 3:], case["b"][:, :, 3:] = math.nan, math.nan
    x, a, b, slots = (case[key] for key in ("x", "a", "b", "token_slots"))
    for backend in ("cpu", "triton"):
        out = case["out"].clone()
        ways.engine_call(out, x, a, b, slots, rank=3, backend=backend)()
        assert_close(out, ways.exact({**case, "a": a[:, :3], "b": b[:, :, :3]}))
    lesson.by_sorting(**case)
    assert case["out"].isnan().all()


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
    assert_refused(about, engine_steps, [("a", 1, 2, 0), ("b", 2, 2, 0)], 1, 4, learner_policy(admit))


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
    assert slots["1"]["waiting"] > slots["2"]["waiting"] > 30 > slots["4"]["waiting"] > slots["8"]["waiting"] == 0
    assert all(7 < record["running"] <= 8 for name, record in slots.items() if name != "cold")
    assert slots["cold"]["starts"] > 100 > slots["cold"]["with_a_third_slot"] == 4
    assert [record["filled"] for record in figures["ranks"].values()] == [1.0, 0.03125]


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("12")
