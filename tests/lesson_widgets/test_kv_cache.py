"""Lesson 01's widget shows what the ledger says, and breaks where it should."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token, max_concurrency, memory_ledger
from minivllm.simulate.hardware import HARDWARE
from minivllm.simulate.known_models import CONFIGS, known_model
from minivllm.simulate.workloads import WORKLOADS
from widgets import kv_cache

EMPTY_BUT_FULL = {"gpu": "H100", "requests": "alpaca", "max_model_len": 8192}
ONE_TOO_LONG = {"max_model_len": 2**17}
TOO_BIG = {"model": "deepseek-ai/DeepSeek-V3", "gpu": "T4", "tp": 8}


def test_a_sweep_is_the_ledger():
    state = kv_cache.sweep(model="Qwen/Qwen3-8B", gpu="H100", kv_dtype="fp8", tp=2, max_model_len=4096, utilization=0.9)
    config = known_model("Qwen/Qwen3-8B")
    ledger = memory_ledger(
        config, "H100", max_model_len=4096, gpu_memory_utilization=0.9, tp=2, kv_dtype="fp8", check=False
    )
    assert state.ledger == ledger
    assert state.needs == tuple((row.name, row.bytes) for row in ledger.rows[: len(state.needs)])
    assert state.needed + ledger.kv_bytes == int(HARDWARE["H100"].memory_bytes * 0.9)
    assert state.tokens == ledger.kv_bytes // (16 * kv_bytes_per_token(config, "fp8", 2)) * 16
    assert state.slots == int(max_concurrency(ledger.tokens, 4096))
    assert state.concurrency[state.contexts.index(4096)] == max_concurrency(ledger.tokens, 4096)
    assert state.longest == ledger.longest_request


@given(
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["auto", "fp8", "nvfp4"]),
    st.floats(0.5, 1.0),
    st.sampled_from(kv_cache.CONTEXTS),
    st.sampled_from(sorted(WORKLOADS)),
)
@settings(max_examples=60, deadline=None)
def test_every_position_of_the_knobs_is_drawn(model, gpu, tp, kv_dtype, utilization, length, requests):
    try:
        state = kv_cache.sweep(model, "", gpu, tp, kv_dtype, utilization, length, requests)
    except MinivllmError:
        assume(False)
    ET.fromstring(kv_cache.figure(state))
    assert kv_cache.verdict(state).words
    assert 0 <= state.held <= state.reserved <= 1
    assert state.fits == (state.slots >= 1)
    assert all(length <= state.max_model_len for length in state.lengths)


def test_how_much_of_a_reserved_slot_ever_holds_a_token():
    """2,048 slots: 24.4 % of them hold ShareGPT's mean of 499 tokens, 3.8 % Alpaca's mean of 78."""
    for requests, mean in (("sharegpt", 499.3), ("alpaca", 77.76)):
        state = kv_cache.sweep(requests=requests)
        assert state.held / state.reserved == pytest.approx(mean / 2048, rel=0.03)


def test_requests_longer_than_a_slot_are_refused_not_cut():
    state = kv_cache.sweep(requests="azure-conversation", max_model_len=512)
    assert 0.5 < state.too_long < 1
    assert state.mean_length < 512
    assert f"{state.too_long:.0%} of the requests are longer and refused" in kv_cache.verdict(state).words


@pytest.mark.parametrize(
    ("knobs", "words", "tone"),
    [
        ({}, ["14 slots of 2,048", "KV cache 3.6", "weights 15.0", "ever holds a token", "max_model_len"], "tight"),
        (ONE_TOO_LONG, ["The KV cache is too small", "One request of 131,072 tokens", "not one fits"], "broken"),
        (TOO_BIG, ["No KV cache at all", "GiB too little"], "broken"),
        (
            {"gpu": "H200", "max_model_len": 512},
            ["if each held only its own tokens", "(the first 240 are drawn)"],
            "tight",
        ),
    ],
)
def test_the_picture_says_what_happens(knobs: dict, words: list[str], tone: str):
    state = kv_cache.sweep(**knobs)
    picture = kv_cache.figure(state)
    assert [word for word in words if word not in picture] == []
    assert kv_cache.verdict(state).tone == tone


def test_the_verdict_names_the_length_that_would_fit():
    state = kv_cache.sweep(**ONE_TOO_LONG)
    assert not state.fits
    assert f"{state.longest:,}" in kv_cache.verdict(state).words
    assert kv_cache.sweep(max_model_len=state.longest).fits
    assert not kv_cache.sweep(max_model_len=state.longest + 1).fits


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": -5}, "max_model_len"),
        ({"utilization": 1.5}, "gpu_memory_utilization"),
        ({"tp": 3}, "3 GPUs"),
        ({"kv_dtype": "int3"}, "int3"),
        ({"gpu": "Voodoo 2"}, "Voodoo 2"),
        ({"requests": "poems"}, "poems"),
        ({"other_model": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs: dict, words: str):
    with pytest.raises(MinivllmError, match=words):
        kv_cache.sweep(**knobs)


def test_the_widget_shows_a_refusal_and_goes_on():
    shown = kv_cache.show()
    shown.knobs["other_model"].value = "/no/such/folder"
    assert "/no/such/folder" in shown.verdict.value
    assert "lesson-widget-error" not in shown.verdict.value
    shown.knobs["other_model"].value = ""
    assert "14 slots" in shown.picture.value


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = kv_cache.show()
    assert "Not yet." in shown.progress.value
    shown.set(**EMPTY_BUT_FULL)
    assert "Met." in shown.progress.value


@pytest.mark.parametrize("knobs", [ONE_TOO_LONG, TOO_BIG, {"max_model_len": 2**14}])
def test_the_challenge_is_not_met_by_an_empty_card(knobs: dict):
    """Nothing reserved, or a lone slot with room left over, is not what was asked for."""
    assert not kv_cache.CHALLENGE.check(kv_cache.sweep(**knobs)).met
