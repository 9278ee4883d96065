"""Lesson 03's widget shows what the counters say and what the online softmax does, and breaks where it should."""

import math
import xml.etree.ElementTree as ET

import ipywidgets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from minivllm.simulate import attention_traffic
from minivllm.simulate.hardware import HARDWARE
from widgets import flash_attention

TOO_LARGE = {"block_q": 256, "block_k": 256}
TOO_SMALL = {"block_q": 16}
OVERFLOW = {"times": 16, "tiles_seen": 24}
GENTLE = {"times": 1 / 16, "tiles_seen": 24}
SOLUTION = {"block_q": 112, "block_k": 16}


def test_a_sweep_is_the_counters():
    state = flash_attention.sweep(length=4096, head_dim=64, heads=16, gpu="A100-80", block_q=96, block_k=32)
    assert state.tiled == attention_traffic.flash_traffic(4096, 64, 96, 32)
    assert state.naive == attention_traffic.naive_traffic(4096, 64)
    assert state.parts == attention_traffic.on_chip_bytes(96, 32, 64)
    assert state.tiled_curve[flash_attention.LENGTHS.index(4096)] == state.tiled.moved
    assert state.longest == attention_traffic.longest_naive(HARDWARE["A100-80"].memory_bytes, 16)
    assert state.stored == 16 * 2 * 4096 * 4096 * 2
    assert state.power == pytest.approx(2, abs=0.05), "traffic stays quadratic"


@given(
    st.sampled_from(flash_attention.LENGTHS),
    st.sampled_from([32, 64, 128, 256]),
    st.sampled_from(sorted(HARDWARE)),
    st.sampled_from([16, 48, 128, 512]),
    st.sampled_from([16, 96, 512]),
    st.sampled_from([48, 227]),
    st.integers(1, 12),
    st.integers(0, 24),
    st.sampled_from([1 / 16, 1, 4, 1e4]),
)
@settings(max_examples=40, deadline=None)
def test_every_position_of_the_knobs_is_drawn(length, head_dim, gpu, block_q, block_k, on_chip, tile, seen, times):
    state = flash_attention.sweep(length, head_dim, 32, gpu, block_q, block_k, on_chip, tile, seen, times)
    ET.fromstring(flash_attention.figure(state))
    assert flash_attention.verdict(state).words
    assert state.tiles_seen <= math.ceil(len(state.row.scores) / tile)
    assert (flash_attention.verdict(state).tone == "broken") >= (not state.fits)


@pytest.mark.parametrize("keys_a_tile", [1, 4, 7, 24, 100])
@pytest.mark.parametrize("times", [1 / 16, 1, 50])
def test_the_steps_end_at_the_softmax_of_the_row(keys_a_tile, times):
    state = flash_attention.sweep(keys_a_tile=keys_a_tile, tiles_seen=99, times=times)
    scores, values = state.row.scores, state.row.values
    weights = [math.exp(score - max(scores)) for score in scores]
    for index in range(3):
        expected = sum(weight * value[index] for weight, value in zip(weights, values, strict=True)) / sum(weights)
        assert state.now.output[index] == pytest.approx(expected, abs=1e-12)
    assert state.now.m == max(scores)


def test_the_row_is_a_row_of_attention():
    row = flash_attention.scaled_row(1)
    assert len(row.tokens) == len(row.scores) == len(row.values) == 24
    assert "".join(row.tokens).startswith("def total(prices, count):")
    rising = {state.m for state in flash_attention.sweep(keys_a_tile=4, tiles_seen=9).states[1:]}
    assert len(rising) >= 4, "the maximum must move, or there is nothing to see"
    assert max(row.scores) > flash_attention.LIMITS["float16"], "the lesson says that real scores overflow float16"


@pytest.mark.parametrize(
    ("knobs", "words", "tone"),
    [
        (
            {},
            ["T × T stored 520 MiB", "tiles 262 MiB", "memory of one H100", "96.5 of 100 KiB"],
            "tight",
        ),
        (TOO_LARGE, ["the chip ends here", "578.0 of 100 KiB"], "broken"),
        (TOO_SMALL, ["16 queries × 64 keys"], "broken"),
        ({"tiles_seen": 24}, ["too much for float16."], "tight"),
        (OVERFLOW, ["too much for float16 and for float32"], "tight"),
        (GENTLE, ["still in the range of float16"], "tight"),
        ({"tiles_seen": 0}, ["−∞"], "tight"),
        (SOLUTION, ["112 queries × 16 keys: 99.9 of 100 KiB"], "fine"),
    ],
)
def test_the_picture_says_what_happens(knobs, words, tone):
    state = flash_attention.sweep(**knobs)
    picture = flash_attention.figure(state)
    assert [word for word in words if word not in picture] == []
    assert flash_attention.verdict(state).tone == tone


def test_the_verdict_names_the_wall():
    state = flash_attention.sweep(length=131072)
    assert f"it ends at {state.longest:,} tokens" in flash_attention.verdict(state).words
    assert 32 * 4 * state.longest**2 <= state.hardware.memory_bytes < 32 * 4 * (state.longest + 1) ** 2
    assert "ends at" not in flash_attention.verdict(flash_attention.sweep(length=16384)).words


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"block_q": 0}, "block_q"),
        ({"length": -1}, "length"),
        ({"on_chip_kib": 0}, "on_chip_kib"),
        ({"keys_a_tile": 0}, "at least 1 key"),
        ({"tiles_seen": -1}, "tiles_seen"),
        ({"times": 0}, "times"),
        ({"gpu": "Voodoo 2"}, "Voodoo 2"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs, words):
    with pytest.raises(MinivllmError, match=words):
        flash_attention.sweep(**knobs)


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = flash_attention.show()
    assert "Not yet." in shown.progress.value
    shown.set(**SOLUTION)
    assert "Met." in shown.progress.value


@pytest.mark.parametrize(
    "knobs",
    [
        {"block_q": 128, "block_k": 16},  # moves less still, and does not fit
        {"block_q": 64, "block_k": 16},
        {**SOLUTION, "head_dim": 64},  # easier than asked
        {**SOLUTION, "on_chip_kib": 227, "block_q": 192},
        {**SOLUTION, "length": 256},
    ],
)
def test_the_challenge_is_not_met_by_less(knobs):
    assert not flash_attention.CHALLENGE.check(flash_attention.sweep(**knobs)).met


def test_the_challenge_needs_the_insight():
    """With more than 16 keys a tile, no number of queries will do."""
    tiles = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
    met = {
        (block_q, block_k)
        for block_q in tiles
        for block_k in tiles
        if flash_attention.CHALLENGE.check(flash_attention.sweep(block_q=block_q, block_k=block_k)).met
    }
    assert met == {(112, 16)}


def test_every_preset_is_what_its_button_says():
    shown = flash_attention.show()
    buttons = {one.description: one for one in walk(shown) if isinstance(one, ipywidgets.Button)}
    for label, words in (
        ("Too large", "no such kernel"),
        ("Too small", "more bytes than storing"),
        ("Start again", "2.0 times"),
    ):
        buttons[label].click()
        assert words in shown.verdict.value
    assert sum(len(label) for label in buttons) < 34, "more does not fit beside each other"


def walk(widget):
    yield widget
    for child in getattr(widget, "children", ()):
        yield from walk(child)
