"""Lesson 01's widget shows what the ledger says, and breaks where vLLM refuses to start."""

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from lessons import widget_harness as harness
from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token, max_concurrency
from minivllm_lab.exercise import load
from minivllm_simulate.hardware import HARDWARE
from minivllm_simulate.known_models import find_model, known_model
from minivllm_simulate.memory import memory_ledger
from widgets import kv_cache
from widgets.kv_cache import sweep
from widgets.shell.plot import percent
from widgets.shell.session import Session

ONE_TOO_LONG = {"max_model_len": 2**15}
TOO_BIG = {"model": "deepseek-ai/DeepSeek-V3", "gpu": "T4", "tp": 8}
BEYOND = {"model": "openai-community/gpt2", "max_model_len": 2**17}
SOLUTIONS = (
    {"gpu": "A100-80", "max_model_len": 2**17},
    {"gpu": "H100", "requests": "alpaca", "max_model_len": 2**13},
    {"model": "Qwen/Qwen2.5-7B", "gpu": "H100", "max_model_len": 2**13},
)
LESSON = Path(__file__).resolve().parents[3] / "vllm" / "01_kv_cache.py"


def query_heads(config, bytes_per_element=2):
    """Make the usual mistake: count the query heads, not the KV heads."""
    return 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * bytes_per_element


def test_a_sweep_is_the_ledger():
    state = sweep(model="Qwen/Qwen3-8B", gpu="H100", kv_dtype="fp8", tp=2, max_model_len=4096, utilization=0.9)
    config = known_model("Qwen/Qwen3-8B")
    ledger = memory_ledger(
        config, "H100", max_model_len=4096, gpu_memory_utilization=0.9, tp=2, kv_dtype="fp8", check=False
    )
    assert state.ledger == ledger
    assert state.needs == tuple((row.name, row.bytes) for row in ledger.rows[: len(state.needs)])
    assert state.needed + ledger.kv_bytes == int(HARDWARE["H100"].memory_bytes * 0.9)
    assert state.tokens == ledger.kv_bytes // (16 * kv_bytes_per_token(config, "fp8", 2)) * 16
    assert state.concurrency[state.contexts.index(4096)] == max_concurrency(ledger.tokens, 4096)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-12b-it"])
def test_a_model_whose_layers_differ_is_shared_out_truly(name):
    """No figure per token holds at every length, so the drawing shows what fits at each length."""
    state = sweep(other_model=name, gpu="H100", max_model_len=32768)
    ledger = memory_ledger(find_model(name), "H100", max_model_len=32768)
    assert state.tokens == ledger.tokens
    assert memory_ledger(find_model(name), "H100", max_model_len=state.longest, check=False).concurrency >= 1
    assert state.wall == find_model(name).max_position_embeddings < state.longest
    assert state.bytes_per_token == round(ledger.kv.blocks_per_request(32768) * ledger.kv.block_bytes / 32768)
    at = dict(zip(state.contexts, state.concurrency, strict=True))
    assert at[32768] == ledger.concurrency
    assert at[131072] == memory_ledger(find_model(name), "H100", max_model_len=131072).concurrency
    assert at[1024] / at[131072] < 128  # a window does not grow with the request
    refused = Session(kv_cache.SPEC, kv_bytes_per_token=lambda config, size: 1).settle(other_model=name)
    assert "bytes per token" in refused["words"]


@given(harness.positions(kv_cache.SPEC), st.sampled_from([360, 400, 600, 640, 760]))
@settings(max_examples=30, deadline=None)
def test_every_position_of_the_knobs_is_drawn(knobs, width):
    try:
        state = sweep(**knobs)
    except MinivllmError:
        return  # heads that cannot be divided, formats that a latent cache cannot take
    harness.marks_drawn(kv_cache.SPEC, state, width, pinned=sweep())
    assert 0 <= state.held <= state.reserved <= 1
    assert state.starts == (state.slots >= 1)
    assert all(length <= state.max_model_len for length in state.lengths)
    verdict = kv_cache.verdict(state)
    assert (verdict.tone == "broken") == (not state.starts or state.held < 0.25)
    if verdict.tone == "fine":
        assert state.held >= 0.5
        assert state.too_long < 0.01
    for challenge in kv_cache.CHALLENGES:
        progress = challenge.check(state)
        assert progress.met == (not progress.advice)


test_verdicts_are_those_of_the_theory = harness.verdict_test(
    kv_cache,
    sweep,
    [
        ({}, "broken", "Full with 14 requests, though 59 would fit by their own lengths: only 23.6 %"),
        ({"requests": "azure-code"}, "tight", "Full with 14 requests"),
        (ONE_TOO_LONG, "broken", "Not one request of 32,768 tokens fits, so vLLM refuses to start"),
        ({"max_model_len": 24 * 1024}, "broken", "Full with 1 request, though"),
        ({**ONE_TOO_LONG, "kv_dtype": "fp8"}, "broken", "Full with 1 request, though"),
        (BEYOND, "broken", "vLLM refuses to start: gpt2 supports 1,024 tokens, but max_model_len is 131,072"),
        ({**BEYOND, "max_model_len": 1024}, "tight", "are longer and are refused"),
        (TOO_BIG, "broken", "No room is left for a KV cache, so vLLM refuses to start"),
        ({**TOO_BIG, "gpu": "H200"}, "broken", "Full with 347 requests"),
    ],
)


def test_the_verdict_names_the_length_that_would_fit():
    state = sweep(**ONE_TOO_LONG)
    assert not state.fits
    assert f"{state.longest:,}" in kv_cache.verdict(state).words
    assert sweep(max_model_len=state.longest).starts
    assert not sweep(max_model_len=state.longest + 1).starts


def test_a_file_wins_over_the_choice(tmp_path):
    own = tmp_path / "mine.csv"
    own.write_text("prompt_tokens,output_tokens\n1000,24\n")
    state = sweep(file=f" {own} ")
    assert state.mean_length == 1024
    assert state.held / state.reserved == 0.5
    assert state.lengths == (1024,) * 14
    assert_refused("there is no file", sweep, file=str(tmp_path / "other.csv"))
    own.write_text("prompt_tokens,output_tokens\n3000,24\n")
    said = kv_cache.verdict(sweep(file=str(own)))
    assert said.words == "Every mine.csv request is longer than 2,048 tokens."


def test_the_lessons_own_function_changes_nothing():
    lesson, knobs = load(LESSON), {"model": "deepseek-ai/DeepSeek-V3", "gpu": "H200", "tp": 8}
    assert sweep(**knobs, kv_bytes_per_token=lesson.kv_bytes_per_token) == sweep(**knobs)


def test_a_wrong_function_shows():
    right, wrong = sweep(), sweep(kv_bytes_per_token=query_heads)
    assert wrong.tokens < right.tokens / 3.9
    assert wrong.slots == 3
    said = kv_cache.verdict(wrong)
    assert said.tone == "broken"
    assert "524,288 bytes per token on each GPU, but the engine counts 131,072: yours is 4 times as much" in said.words
    assert "the engine's count" in kv_cache.figure(wrong)
    assert "the engine's count" not in kv_cache.figure(right)
    for challenge, solution in zip(kv_cache.CHALLENGES, SOLUTIONS, strict=True):
        assert not challenge.check(sweep(**solution, kv_bytes_per_token=query_heads)).met


test_a_function_that_does_not_end_fails_or_returns_nonsense_is_given_up = harness.own_code_test(
    kv_cache.SPEC,
    [
        (harness.endless, "your kv_bytes_per_token did not return within 0.2 s"),
        (lambda config, size: config.nothing, "Your kv_bytes_per_token broke"),
        (lambda config, size: None, "returned None"),
        (lambda config, size: -1, "returned -1"),
        (lambda config, size: math.nan, "returned nan"),
    ],
    "widgets.kv_cache.state.PATIENCE",
)


@pytest.mark.parametrize("count", [10**30, 1e-9])
def test_whatever_number_a_function_returns_is_drawn(count):
    harness.marks_drawn(kv_cache.SPEC, sweep(kv_bytes_per_token=lambda config, size: count))


test_each_challenge_falls_to_no_single_knob_and_can_be_met = harness.solution_test(kv_cache, sweep, SOLUTIONS)


@given(share=st.floats(0, 1))
def test_no_share_is_rounded_to_all_or_nothing(share):
    assert (percent(share, 1) == "100.0 %") == (share == 1)
    assert (percent(share, 1) == "0.0 %") == (share == 0)
    assert abs(float(percent(share, 1).removesuffix(" %")) - share * 100) <= 0.051


def test_the_guess_is_right():
    guess, state = kv_cache.SPEC.guess, sweep(**kv_cache.SPEC.start())
    assert guess.options[guess.right] == "about 25 %"
    assert 0.22 < state.held < 0.28
    assert state.slots == 14
    assert f"{state.mean_length:,.0f} tokens on average" in guess.because
