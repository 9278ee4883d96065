"""Lesson 04: its scheduler is the engine's, its formula and its kernel are right, its exercise
catches mistakes.
"""

import pytest
from kernels.harness import assert_compiles
from lessons.harness import exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig
from minivllm_lab.checks.plugged import serve
from minivllm_lab.continuous_batching import report
from minivllm_lab.continuous_batching.budget import long_before_chat
from minivllm_lab.exercise import checks_of, load, plug_of
from minivllm_lab.pictures.followed import followed
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

lesson = load(script_path("04"))
checks = {check.__name__: check for check in checks_of("04")}
BLOCKS = CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False)


# ---- the seats -----------------------------------------------------------------------------------


def test_counts_agree_with_the_formula():
    results = lesson.measure_seats(requests=256, seats=8, seed=0)
    for shares in results.values():
        assert shares["static"] == pytest.approx(shares["formula"], abs=0.05)
        assert 0.85 < shares["continuous"] < 1, "no seat is empty but at the end, when nobody waits"
    released = {"Azure conversation": 0.462, "Azure code": 0.266}  # counted on every request of the files
    for title, share in released.items():
        assert results[title]["theory"]["8"] == pytest.approx(share, abs=0.03)


# ---- the kernel ----------------------------------------------------------------------------------


def test_the_scripts_own_proof_holds(device):
    assert lesson.verify_kernel(device)["largest_error"] < 4e-3


@pytest.mark.parametrize(("head_dim", "group"), [(80, 4), (128, 1)])
def test_the_kernel_compiles_everywhere(head_dim, group):
    assert_compiles(
        lesson.ragged_kernel,
        {
            **dict.fromkeys(("out", "q", "keys", "values"), "*bf16"),
            **dict.fromkeys(("query_start_loc", "key_start_loc"), "*i32"),
            "num_seqs": "i32", "scale": 0.1, "GROUP": group, "KV_HEADS": 8, "HEAD_DIM": head_dim,
            "BLOCK_D": 128, "BLOCK_Q": 16, "BLOCK_T": 32,
        },
        tensor_core=True,
        load_bytes=16,
    )  # fmt: skip


def test_requests_begin_where_those_before_them_end():
    assert lesson.starts([2, 9, 5]).tolist() == [0, 2, 11, 16]


# ---- break it, and the engine --------------------------------------------------------------------


def test_a_budget_below_the_batch_starves_the_last():
    assert list(lesson.starved(5, 20).values()) == [20] * 5 + [0] * 3


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("04")


FOLLOWED = {"for": (5, 6), "class": (10, 6)}


def by_hand(pool) -> list[dict[str, int]]:
    """Return the lesson's two tables: `add` runs alone, then the others arrive."""
    scheduler = lesson.Scheduler([lesson.Request("add", 9, 6)], token_budget=12, max_num_seqs=4, pool=pool)
    steps = []
    for step in scheduler.steps():
        steps.append(step)
        if len(steps) == 1:
            scheduler.waiting.extend(lesson.Request(name, *lengths) for name, lengths in FOLLOWED.items())
    return steps


def test_the_examples_by_hand():
    ample, tight = by_hand(lesson.Pool()), by_hand(lesson.Pool(num_free_blocks=8, block_size=4))
    assert len(ample) == 8
    assert ample[1:3] == [{"add": 1, "for": 5, "class": 6}, {"add": 1, "for": 1, "class": 4}]
    assert tight[:4] == ample[:4]
    assert tight[4:8] == [{"add": 1, "for": 1}, {"add": 1, "for": 1}, {"for": 1, "class": 11}, {"class": 1}]
    assert len(tight) == 11
    assert sum(map(sum, (step.values() for step in tight))) - sum(map(sum, (step.values() for step in ample))) == 11


def test_the_pictures_show_the_steps_of_the_table():
    steps = [{row.request: row.num_scheduled_tokens for row in step.rows} for step in followed("company").steps]
    assert steps == by_hand(lesson.Pool())


def test_a_chunk_stands_before_a_decode_that_was_admitted_later():
    steps = [list(step.items()) for step in long_before_chat()]
    assert steps[:3] == [[("long", 8), ("chat", 3)], [("long", 8), ("chat", 1)], [("long", 4), ("chat", 1)]]


def test_a_smaller_budget_shortens_the_longest_gap_and_the_prompt_waits_longer():
    cost = LinearCost(per_step=0.01, per_token=1e-4)
    results = [report.long_prompt(budget, BLOCKS, cost) for budget in (8192, 1024, 128)]
    gaps, waits = [result["longest_gap"] for result in results], [result["ttft"] for result in results]
    assert gaps == sorted(gaps, reverse=True)
    assert waits == sorted(waits)
    assert gaps[0] == pytest.approx(0.01 + 1e-4 * (4096 + 16))
    assert all(result["usual_gap"] < 0.0125 for result in results)


def decode_line(gpu: str) -> tuple[float, float]:
    """Return the modelled milliseconds of a decode without context, and those of each token of
    context.
    """
    cost = RooflineCost.of(known_model(report.SERVED), get_hardware(gpu))
    near, far = (1e3 * cost.seconds(StepShape.of([(1, context)])) for context in (0, 100_000))
    return near, (far - near) / 100_000


def test_the_step_model_on_published_figures_that_it_was_not_fitted_to():
    """The A100's figure is from gpt-fast's README, the B200's are from vLLM's blog of 2026-04-22;
    the notes have them in a table.
    """
    a100, _ = decode_line("A100")
    b200, slope = decode_line("B200")
    pairs = [(1e3 / a100, 93.83), (b200, 3.93), (1e6 * slope, 18)]
    off_by = [modelled / published - 1 for modelled, published in pairs]
    assert [round(100 * share) for share in off_by] == [8, -15, 1]


@pytest.mark.parametrize(
    ("decision", "about"),
    [
        (lambda running, waiting, *_: {waiting[0].request_id: 99} if waiting else {}, "12 are left of the budget"),
        (lambda running, waiting, *_: {(*running, *waiting)[-1].request_id: 1}, "at the head of the queue"),
        (lambda *_: {"nobody": 1}, "request 'nobody' 1 tokens"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_one_line(decision, about):
    plugged = plug_of("04")(type("Learner", (), {"schedule": staticmethod(decision)}))
    assert_refused(about, serve, plugged, plugged.parts)


def test_a_wrong_prediction_is_caught():
    right = lesson.first_steps()
    for step, name in ((0, "B"), (1, "C"), (3, "D")):
        wrong = [dict(step) for step in right]
        wrong[step][name] += 1
        with pytest.raises(AssertionError, match=f"step {step + 1}"):
            checks["check_prediction"](type("Learner", (), {"first_steps": staticmethod(lambda wrong=wrong: wrong)}))


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("04", tmp_path)
    alone, static, batched, paged = figures["engine"]["ways"].values()
    assert alone["most"] == 1
    assert "max_model_len to 304 or less" in figures["refused"], "19 blocks of 16"
    assert static["most"] == batched["most"] == report.RESERVED < paged["most"]
    assert static["steps"] > batched["steps"] > paged["steps"]
    assert figures["engine"]["both"] == pytest.approx(figures["engine"]["batching"] * figures["engine"]["paging"])
