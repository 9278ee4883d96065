"""Lesson 03's widget shows what the counters say and what the online softmax does, and breaks where
it should.
"""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons import widget_harness as harness
from minivllm_lab.exercise import load
from minivllm_lab.flash_attention import attention_traffic
from minivllm_lab.pictures.palette import GREEN, INK, ORANGE, SKY
from widgets import flash_attention
from widgets.flash_attention import SPEC, detail, figure, sweep, verdict
from widgets.flash_attention.walk import captions

SOLVED = (
    {"block_q": 128},
    {"gpu": "RTX 4090", "head_dim": 256, "block_q": 128, "block_k": 16},
    {"block_q": 320, "block_k": 16, "length": 32768},
)
LESSON = Path(__file__).resolve().parents[3] / "vllm" / "03_flash_attention.py"


@given(harness.positions(SPEC), st.sampled_from([360, 400, 599, 600, 640, 760]))
@settings(max_examples=20, deadline=None)
def test_every_position_of_the_knobs_is_drawn(knobs, width):
    state = sweep(**knobs)
    harness.marks_drawn(SPEC, state, width, pinned=sweep())
    words = verdict(state)
    broken = not state.launches or state.less < 1
    assert (words.tone == "broken") == broken
    assert (words.tone == "fine") == (not broken and not state.spills and state.less >= 2)


@given(harness.positions(SPEC))
@settings(max_examples=10, deadline=None)
def test_the_edges_are_where_the_verdict_changes(knobs):
    state = sweep(**knobs)
    for queries, traffic in zip(state.queries, state.by_queries, strict=True):
        neighbour = sweep(**{**knobs, "block_q": queries})
        assert neighbour.launches == (queries <= state.launched)
        assert neighbour.spills == (queries > state.kept)
        if queries < state.few:
            assert traffic.moved > state.naive.moved
    assert state.few <= max(16, 1.25 * state.head_dim / 4)
    assert state.longest == attention_traffic.longest_naive(state.hardware.memory_bytes, 32)


test_the_verdict_is_what_theory_says = harness.verdict_test(
    flash_attention,
    sweep,
    [
        ({"head_dim": 128, "block_q": 16}, "broken", "1.99 times as many bytes"),  # fewer than d / 4 queries
        ({"head_dim": 64, "block_q": 32}, "tight", "1.98 times fewer"),
        ({"block_q": 128, "block_k": 128}, "fine", "3.8"),  # FlashAttention-3's own
        ({"block_q": 128, "block_k": 128, "stages": 4}, "broken", "288 KiB of shared memory, but the limit is 227"),
        ({"block_q": 256}, "tight", "registers spill"),  # as the lesson's table says: 144 bytes
        ({"head_dim": 256, "block_q": 128, "block_k": 80}, "tight", "times fewer"),  # the last that fits
        ({"head_dim": 256, "block_q": 128, "block_k": 96}, "broken", "does not launch"),
        ({"gpu": "RTX 4090", "block_q": 128, "block_k": 64, "stages": 1}, "fine", "3.88 times fewer"),
    ],
)


def test_the_frames_walk_the_row_tile_by_tile():
    state = sweep(block_q=128)
    frames = captions(state)
    picture = detail(state)
    assert json.loads(ET.fromstring(picture).get("data-frames", "")) == frames
    assert len(frames) == 1 + len(state.steps)
    assert "24 of 24 keys" in frames[-1]
    last = len(frames) - 1
    ends = [tuple(map(int, at.split())) for at in re.findall(r'data-at="([^"]+)"', picture)]
    assert ends
    assert all(0 <= first <= end <= last for first, end in ends)
    assert "shrink × 0.454" in frames[3], "frame k is tile k of the row"


@pytest.mark.parametrize("knobs", [{}, {"block_q": 128}, {"block_q": 1024, "length": 1024}])
def test_a_line_is_one_tile_of_queries_with_the_keys_that_it_reads_and_as_high_as_its_scores(knobs):
    state = sweep(**knobs)
    picture = figure(state)
    marks = list(ET.fromstring(picture).iter())
    [tile] = [mark for mark in marks if (mark.get("fill"), mark.get("stroke")) == (ORANGE, INK)]
    [lines] = [mark for mark in marks if mark.get("stroke") == SKY and mark.get("d")]
    [side] = [mark for mark in marks if (mark.get("data-tip") or "").startswith("A program keeps")]
    assert float(tile.get("height", 0)) == pytest.approx(float(lines.get("stroke-width", 0)), abs=0.1)
    read = [float(line) for line in re.findall(r"h([\d.]+)", lines.get("d", ""))]
    seen = [seen for _, seen in attention_traffic.flash_programs(state.length, state.block_q, state.block_k)]
    each = len(seen) // len(read)
    assert f">{len(seen)} tile" in picture
    assert (f">1 in {each} is drawn<" in picture) == (each > 1)
    pixels = float(side.get("height", 0)) / state.length
    assert read == pytest.approx([pixels * keys for keys in seen[each - 1 :: each]], abs=0.1)


def never_corrected(state, scores, values):
    """Forget the factor on l."""
    m = np.maximum(state.m, scores.max(axis=1))
    weights = np.exp(scores - m[:, None])
    return type(state)(m, state.l + weights.sum(axis=1), np.exp(state.m - m)[:, None] * state.o + weights @ values)


def test_the_readers_step_walks_the_row():
    state = sweep(softmax_step=load(LESSON).softmax_step)
    assert state.wrong is None
    assert "Your softmax_step gives the right row" in verdict(state).words
    assert f'stroke="{GREEN}"' in detail(state), "the output and that of the whole row are framed together"


def test_a_wrong_factor_shows_in_the_frame_where_it_happens():
    state = sweep(softmax_step=never_corrected)
    assert [bool(step.wrong) for step in state.steps] == [False, False, True, True, True, True]
    assert state.steps[2].wrong == ("l",)
    outcome = verdict(state)
    assert outcome.tone == "broken"
    assert "tile 3" in outcome.words
    assert "multiplied the old l by 1.000, but exp(old m − new m) is 0.454" in outcome.words
    assert "l wrong" in captions(state)[3]
    assert "✕" in detail(state)
    assert f'stroke="{GREEN}"' not in detail(state)


test_broken_code_is_said_in_one_line = harness.own_code_test(
    SPEC,
    [
        (lambda state, scores, values: None, "NoneType at tile 1"),
        (lambda state, scores, values: (state.m, state.l, values[:, :1].T @ values[:, :2]), "o of 2 numbers"),
        (harness.endless, "did not return"),
    ],
    "widgets.flash_attention.row.PATIENCE",
)
test_each_challenge_can_be_met_but_by_no_other_knob_alone = harness.solution_test(flash_attention, sweep, SOLVED)


def test_the_guess_is_right():
    state = sweep()
    assert (state.block_q, state.programs, 4 * state.length * state.head_dim) == (16, 512, 4 * 2**20)
    assert state.tiled.moved / state.naive.moved == pytest.approx(2, rel=0.02)
    assert SPEC.guess.options[SPEC.guess.right] == "Twice as many"
    assert state.kept < state.launched < state.queries[-1], "registers run out first"
