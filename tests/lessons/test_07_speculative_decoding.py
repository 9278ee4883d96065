"""Lesson 07: its guesses change no token, its rule no distribution; its kernel is right, its checks catch mistakes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, assert_refuses, figures_of_quick_run, script_path

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, SpeculativeConfig
from minivllm.lab.cached_model import CachedModel
from minivllm.lab.exercise import load
from minivllm.lab.kernel_trace import trace_kernel
from minivllm.lab.reports import speculative_decoding as report
from minivllm.models.loader import load_model
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.speculation import RECORDED
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer

lesson = load(script_path("07"))
TEXT = (REPOSITORY / "lessons" / "07_speculative_decoding.md").read_text()

# ---- lesson form and engine form -------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)
)  # fmt: skip
def test_the_proposer_looks_up_what_the_engines_does(token_ids, one, other, k):
    least, most = min(one, other), max(one, other)
    config = SpeculativeConfig(num_speculative_tokens=k, prompt_lookup_max=most, prompt_lookup_min=least)
    engines = NgramProposer(config, max_model_len=1000).drafts_after(np.array(token_ids, np.int32))
    assert lesson.propose_ngram(token_ids, least, most, k) == engines


# ---- the kernels -----------------------------------------------------------------------------------------------------

BATCHES = {
    "one request": [1],
    "no drafts": [0, 0],
    "of unlike number": [3, 0, 1, 3, 2],
    "many": [7, 4],
}


@pytest.mark.parametrize("vocabulary", [1, 127, 129])
@pytest.mark.parametrize("counts", BATCHES.values(), ids=list(BATCHES))
def test_the_kernels_do_what_the_rule_says(counts, vocabulary, device):
    torch.manual_seed(vocabulary)
    arguments = report.draft_batch(counts, vocabulary)
    arguments[2][1:2] = -1
    found = lesson.rejection_launch(*(one.to(device) for one in arguments), block=128)
    assert found.tolist() == report.verified_one_by_one(lesson.verify, arguments)


@pytest.mark.interpreted
def test_the_kernels_read_the_bytes_that_they_say():
    counts, vocabulary, k = [2, 0, 3], 200, 3
    p, q, drafts, starts, uniforms, noise = report.draft_batch(counts, vocabulary)
    q_row = torch.tensor([0, 1, -1, -1, 2, 3, 4, -1], dtype=torch.int32)
    instead, output = torch.empty(8, dtype=torch.int32), torch.empty(3, k + 1, dtype=torch.int32)
    race = trace_kernel(lesson.recover_kernel, 8, instead, p, q, noise, q_row, vocabulary, BLOCK=128)
    assert [race.arguments[name].bytes_read for name in ("p", "q", "noise")] == [6400, 4000, 6400]
    assert race.bytes_read == (12 * 5 + 8 * 3) * vocabulary + 4 * 8
    trace = trace_kernel(
        lesson.rejection_kernel, 3, output, drafts, instead, p, q, uniforms, starts, k + 1, vocabulary, BLOCK=4
    )
    assert trace.bytes_read == 16 * 5 + 12 * 3
    assert trace.bytes_written == 4 * (k + 1) * 3
    for one in (race, trace):
        assert not one.out_of_bounds + one.races


def test_the_kernels_compile():
    integers, numbers = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 128)
    shared = {"instead": integers, "p": numbers, "q": numbers, "vocab_size": 128}
    rejection = {"output": integers, "drafts": integers, "uniforms": numbers[0], "draft_start": integers, "width": 4}
    assert_compiles(lesson.rejection_kernel, {**shared, **rejection, "BLOCK": 4})
    assert_compiles(lesson.recover_kernel, {**shared, "noise": numbers, "q_row": integers, "BLOCK": 1024})


# ---- the loop --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    """Target and draft, float32."""
    return [load_model(path, "cpu", torch.float32)[0] for path in (EMBEDDED_MODEL, EMBEDDED_DRAFT)]


def test_drafts_change_no_token_and_save_passes(models):
    prompt = list(range(300, 330)) * 2
    runs = {
        "none": lesson.decode(CachedModel(models[0], 256), prompt, 32),
        "n-gram": lesson.generate(CachedModel(models[0], 256), lesson.Ngram(4096), prompt, 32, 3),
        "draft model": lesson.generate(
            CachedModel(models[0], 256), lesson.DraftModel(CachedModel(models[1], 256)), prompt, 32, 3
        ),
        "Jacobi": lesson.jacobi(CachedModel(models[0], 256), prompt, 32, 3),
    }
    assert all(one.tokens == runs["none"].tokens for one in runs.values())
    assert max(runs["n-gram"].passes, runs["draft model"].passes) < runs["none"].passes == 32
    assert runs["Jacobi"].passes <= 32


def test_the_engine_counts_the_same(models):
    """The lesson's loop and the engine: the same tokens, and as many drafts accepted, place by place."""
    (prompt,) = report.held_out_prompts(str(EMBEDDED_MODEL), 1)
    ours = lesson.generate(CachedModel(models[0], 256), lesson.Ngram(4096), prompt, 48, 3)
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = LLM(
        EMBEDDED_MODEL,
        device="cpu",
        dtype="float32",
        max_model_len=256,
        num_gpu_blocks_override=40,
        speculative_config=settings,
    )
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.outputs[0].token_ids == ours.tokens
    assert llm.llm_engine.stats.spec_decoding_stats == ours.stats


def test_a_temperature_changes_nothing_but_the_passes(models):
    """Drawn with the draft's probabilities kept: what is drafted comes from q, and what comes out is a token of p."""
    torch.manual_seed(0)
    draft = lesson.DraftModel(CachedModel(models[1], 128), temperature=1.0)
    run = lesson.generate(CachedModel(models[0], 128), draft, list(range(300, 330)), 24, 3, temperature=1.0)
    assert len(run.tokens) == 24
    assert 24 / 4 <= run.passes < 24


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_the_rule_is_exact_and_its_look_alikes_are_caught():
    found = report.try_rules(lesson.RULES, 8_000, seed=1)
    rules = found["rules"]
    assert rules.pop("the rule")["p"] > 0.01
    assert all(one["p"] < 1e-3 for one in rules.values()), rules
    accepted = report.try_rules({"the rule": lesson.verify}, 8_000, seed=2)["rules"]["the rule"]["accepted"]
    off = (found["sum_min"] * (1 - found["sum_min"]) / 8_000) ** 0.5
    assert accepted == pytest.approx(found["sum_min"], abs=3 * off)


# ---- what the text says ----------------------------------------------------------------------------------------------


def test_the_formula_is_a_sum():
    assert lesson.expected_tokens(0.7, 3) == pytest.approx((1 - 0.7**4) / (1 - 0.7)) == pytest.approx(2.533)
    assert lesson.expected_tokens(1.0, 3) == 4
    assert lesson.speed_up(0.5, 1, draft_cost=0.5) == pytest.approx(1.0), "it pays only if alpha exceeds c"


def test_break_even_is_where_the_speed_up_falls_below_one():
    assert report.break_even({1: 2.0, 16: 1.5, 64: 0.5}) == pytest.approx(32)
    assert report.break_even({1: 2.0, 64: 1.0}) is None
    assert report.break_even({1: 0.9, 8: 0.8}) is None


P, Q = np.array([[0.5, 0.3, 0.2]] * 2), np.array([[0.3, 0.1, 0.6]])


def test_the_rule_by_hand():
    """The table of the text: `*` with two random numbers, the race, and what comes out in all."""
    noise = np.array([[1.2, 0.4, 0.7]] * 2)
    assert np.minimum(P[0], Q[0]).sum() == pytest.approx(0.6)
    assert lesson.accept(P, Q, [2], np.array([0.5])) == 0
    assert lesson.accept(P, Q, [2], np.array([0.3])) == 1
    assert lesson.verify(P, Q, [2], np.array([0.5]), noise) == [1]
    missing = np.maximum(P[0] - Q[0], 0)
    assert np.minimum(P[0], Q[0]) + missing == pytest.approx(P[0])
    assert (missing / noise[0]).round(2).tolist() == [0.17, 0.5, 0.0]


def test_tokens_and_cost_by_hand():
    assert lesson.expected_tokens(0.6, 1) == pytest.approx(1.6)
    assert lesson.expected_tokens(0.6, 3) == pytest.approx(2.18, abs=0.005)
    assert lesson.speed_up(0.6, 3, draft_cost=0.1) == pytest.approx(1.67, abs=0.005)
    assert lesson.speed_up(0.6, 3, 0, verify_cost=4) == pytest.approx(0.55, abs=0.01)
    assert lesson.speed_up(0.6, 3, 0, verify_cost=2.5) == pytest.approx(0.87, abs=0.005)
    h100 = get_hardware("H100")
    assert h100.flops["bfloat16"] / h100.bandwidth == pytest.approx(295, abs=1)
    assert round(295 / 4) == 74


def test_counts_and_formula_by_hand():
    """vLLM's counters, which the widget has too: what they add up to, and what the formula says from the first."""
    said = {"ngram": (2.53, 2.14), "draft_model": (2.11, 2.06)}
    for method, (counted, formula) in said.items():
        one = RECORDED[method]
        assert round(1 + sum(one.accepted) / one.drafts, 2) == pytest.approx(counted, abs=0.006)
        assert round(lesson.expected_tokens(one.rates[0], 3), 2) == formula
        for number in (*map("{:.2f}".format, one.rates), f"{formula}"):
            assert number in TEXT


def test_no_answer_of_the_exercise_stands_before_it():
    before = TEXT.partition("## Build it")[0]
    assert "@triton.jit" not in before
    assert "np.argmax" not in before


# ---- the script from outside -----------------------------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("07", tmp_path)
    family = figures["family"]
    assert family["no drafts"]["tokens_per_pass"] == 1
    assert min(family[name]["tokens_per_pass"] for name in ("n-gram", "draft model")) > 1.2
    assert all(one["length"] <= 4 for one in family.values())
    assert figures["kernel"]["4096"] == {"race": (12 * 9 + 8 * 5) * 4096, "rejection": 16 * 9 + 12 * 5}
    for one in figures["batches"]["batches"].values():
        assert one["same"] == 1.0
        assert one["predicted"] == pytest.approx(one["free"] / one["cost"])
        assert 1.2 < one["length"] < 3.6
    kept, likeliest = (figures["temperature"][name] for name in ("kept", "likeliest"))
    assert kept["0.0"] == likeliest["0.0"], "greedy, both are how often the two agree"
    assert kept["1.5"] > likeliest["1.5"]


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--drafts", "0"), "--drafts: must be from 1 to 16"),
        (("--drafts", "17"), "--drafts: must be from 1 to 16"),
        (("--draft-model", "nowhere"), "nowhere"),
        (("--model", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(lesson, *arguments, about=about)
