"""Lesson 02's widget: both costs are counted, it breaks where it should, and the pool it plays is a
real one.
"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT

from lessons import widget_harness as harness
from minivllm.core.block_pool import BlockPool
from minivllm_lab.exercise import load
from minivllm_simulate.workloads import WORKLOADS
from widgets import paged_attention as widget
from widgets.paged_attention.figure import percent
from widgets.shell.session import Session

LONG: dict[str, Any] = {"requests": "azure-code", "samples": 1, "kernel": "line", "row_bytes": 64}
SOLVED: tuple[dict[str, Any], ...] = (
    {"block_size": 64, "requests": "azure-conversation", "samples": 1},
    {"requests": "azure-code", "samples": 8, "block_size": 16},
    {**LONG, "block_size": 32},
)


def played(**settings: Any):
    session = Session(widget.SPEC, **settings)
    return session, session.settle()


@given(harness.positions(widget.SPEC), st.sampled_from([360, 400, 600, 640, 760]))
@settings(max_examples=20, deadline=None)
def test_whatever_the_knobs_say_it_adds_up_and_is_drawn(knobs, width):
    state = widget.sweep(**knobs)
    assert all(0 <= share < 1 for share in state.empty.values())
    assert all(extra > 0 for extra in state.extra.values())
    taken = {size: cost for size, cost in state.cost.items() if size >= 16}
    assert min(taken.values()) == state.cost[state.valley]
    assert state.play.fault == ""
    empty, extra = state.empty[state.block_size], state.extra[state.block_size]
    broken = empty > state.allowed or extra > state.allowed or state.block_size < 16
    assert (widget.verdict(state).tone == "broken") == broken
    assert f"--block-size {state.block_size}\n" in widget.command(state)
    assert "most" not in widget.verdict(state).words.lower()
    harness.marks_drawn(widget.SPEC, state, width)


test_verdicts = harness.verdict_test(
    widget,
    widget.sweep,
    [
        ({}, "broken", "Blocks of 32", "10 % allowed"),
        ({"block_size": 16}, "fine", "Blocks of 16", "9.3 % of the held slots", "16 is the cheapest"),
        ({"block_size": 8}, "broken", "Blocks of 8", "no kernel in vLLM takes fewer than 16"),
        ({"kernel": "line", "row_bytes": 64, "allowed": 0.02}, "broken", "4.3 % more bytes", "2 % allowed"),
        ({"block_size": 512}, "broken", "10 % allowed"),
        ({"block_size": 16, "requests": "azure-conversation"}, "fine"),
        (LONG | {"kernel": "token"}, "broken", "too many to look up: the kernel fetches 25 % more"),
    ],
)


def test_the_valley_lies_near_the_lessons_formula():
    for name in WORKLOADS:
        for kernel in ("sector", "line"):
            for row in widget.ROWS:
                state = widget.sweep(requests=name, samples=1, kernel=kernel, row_bytes=row)
                balance = math.sqrt(2 * state.tokens * widget.KERNELS[kernel].piece / (2 * row))
                apart = abs(math.log2(state.valley / max(balance, 16)))
                assert apart <= 1.5, (name, kernel, row, state.valley, balance)
    assert widget.sweep(kernel="token").valley == 16, "it looks up every token: blocks save it nothing"


def test_two_figures_that_differ_are_never_said_alike():
    assert percent(0.05004, 0.05) == "5.004 %"
    assert percent(0.05, 0.05) == "5 %"
    assert percent(0.0200000001, 0.02) == "2.00000001 %"
    assert percent(1.0) == "100 %"


def test_the_first_view_leads_from_two_tables_into_blocks_that_they_share_and_blocks_of_their_own():
    state = widget.sweep()
    at = f" {len(state.play.frames) - 1}"
    layers = [layer for layer in harness.marks_drawn(widget.SPEC, state) if layer.get("data-at", "").endswith(at)]
    arrows = [mark.get("d", "") for layer in layers for mark in layer if "C" in mark.get("d", "")]
    ends = [end for arrow in arrows for end in re.findall(r"C[^M]* ([\d.]+) [\d.]+M", arrow)]
    assert (len(ends), len(set(ends))) == (8, 6)


def test_the_readers_pool_plays():
    lesson = load(ROOT / "vllm" / "02_paged_attention.py")
    session, view = played(block_pool=lesson.BlockPool)
    assert session.state.own
    assert session.state.play == widget.sweep().play, "the lesson's pool hands out what the engine's does"
    assert "wrong" not in view["words"]

    class ForgetsForks(lesson.BlockPool):
        def touch(self, blocks):
            pass

    session, view = played(block_pool=ForgetsForks, block_size=16)
    assert (view["tone"], view["words"][:18]) == ("broken", "Your pool is wrong")
    assert "samples of request 1 write into block" in view["svg"]
    assert ">✕<" in view["svg"]


def stub(count):
    raise NotImplementedError("take num_blocks")


class NeverEnds(BlockPool):
    touch = harness.endless


test_a_stub_or_an_endless_pool_is_said_in_one_line = harness.own_code_test(
    widget.SPEC,
    [(stub, "Your block_pool broke. NotImplementedError"), (NeverEnds, "your block pool did not return")],
    "widgets.paged_attention.PATIENCE",
)
test_each_challenge_can_be_met_but_by_no_knob_alone = harness.solution_test(widget, widget.sweep, SOLVED)


def test_the_guess_is_right():
    guess = widget.SPEC.guess
    state = widget.sweep()
    assert f"{state.tokens:.0f}" == "79", "some 80 tokens"
    assert state.block_size == 32
    shares = [float(option.removesuffix(" %")) / 100 for option in guess.options]
    assert min(shares, key=lambda share: abs(share - state.empty[32])) == shares[guess.right]
    assert state.empty[16] == pytest.approx(8 / 88, rel=0.05), "8 slots beside 80 tokens"
    assert 0.25 < state.empty[64] < 0.3, "more than a quarter, says the first challenge"


def test_lengths_of_ones_own(tmp_path: Path):
    file = tmp_path / "mine.csv"
    file.write_text("prompt_tokens,output_tokens\n" + "1000,30\n40,60\n" * 5)
    state = widget.sweep(file=str(file))
    assert state.tokens != widget.sweep().tokens
    harness.marks_drawn(widget.SPEC, state)
    assert "no file" in played(file="nowhere.csv")[1]["words"]
