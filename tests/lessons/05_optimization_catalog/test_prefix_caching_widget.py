"""Lesson 05's prefix cache shows what the block pool finds, falls off its cliff where it should,
and says why.
"""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons import widget_harness as harness
from minivllm.core.block_hash import hash_block_tokens
from minivllm_lab.exercise import load
from widgets import prefix_caching as widget
from widgets.prefix_caching import state as states
from widgets.shell.session import Session
from widgets.shell.spec import Progress

LESSON = Path(__file__).resolve().parents[3] / "vllm" / "05_optimization_catalog.py"


last = partial(harness.last_state, widget)


def test_the_map_grows_and_the_readers_own_cell_comes_first():
    states._runs.cache_clear()
    seen = list(widget.sweep())
    sizes = [len(state.cells) for state in seen]
    assert sizes == sorted(sizes)
    assert (8, 6144) in seen[0].cells
    assert seen[0].endless is None, "the first picture waits for one cell only"
    assert len(seen) > 3
    assert set(seen[-1].cells) == {(users, pool) for users in widget.USERS for pool in widget.POOLS}
    assert len(list(widget.sweep(pool=16384, users=12))) == 1, "moving in the map computes nothing"


# ---- held against theory


def test_the_cliff_is_where_the_documents_no_longer_fit():
    """Each user has a document of 1,024 tokens: a pool below users × 1,024 hits nothing, one with
    room to run hits all.
    """
    state = last()
    for (users, pool), cell in state.cells.items():
        if users * 1024 > pool:
            assert cell.hit_rate == 0
            assert state.missed(cell)
        elif users * 1024 + 1100 < pool and cell.evicted == 0:
            assert cell.hit_rate == pytest.approx(2 / 3 * 1024 / 1056)
    assert state.kept == 8 * 1024


test_verdicts_are_those_of_theory = harness.verdict_test(
    widget,
    last,
    [
        ({}, "broken", "The cache thrashes: 0.0 %"),
        ({"pool": 8192}, "tight", "a cache that never evicts would reach 64.6 %"),
        ({"pool": 12288}, "fine", "all that a cache that never evicts would hit. p95"),
        ({"target": 30}, "tight", "24.8 ms (modelled); the limit is 30 ms"),
        ({"kind": "none", "pool": 24576}, "broken", "no pool helps"),
        ({"kind": "none", "target": 30}, "fine", "nothing to hit"),
        ({"kind": "system", "users": 16, "pool": 2048}, "fine", "all that a cache that never evicts would hit"),
        ({"kind": "chat", "users": 16, "turns": 4, "prefix": 256, "pool": 2048}, "tight", "evicts would reach 82"),
        ({"kind": "agent", "users": 16, "turns": 4, "pool": 2048}, "broken", "the others wait for room"),
        ({"order": "at random", "users": 16, "pool": 24576, "target": 10}, "broken", "even a cache that never evicts"),
    ],
)


@given(harness.positions(widget.SPEC), st.sampled_from([360, 400, 640, 760]))
@settings(max_examples=25, deadline=None)
def test_every_position_of_the_knobs_is_drawn_and_judged_by_its_numbers(values: dict, width: int):
    state = next(widget.sweep(**values))
    harness.marks_drawn(widget.SPEC, state, width)
    tone = widget.verdict(state).tone
    assert (tone == "broken") == (state.ttft(state.here) > state.target)
    assert tone != "fine" or state.lost == 0
    assert "as many" not in widget.verdict(state).words
    assert all(isinstance(challenge.check(state), Progress) for challenge in widget.CHALLENGES)
    assert 0 <= state.hit_rate <= state.endless_rate < 1


# ---- challenges and the guess


SOLVED = (
    {"pool": 8192},
    {"kind": "system", "users": 16, "turns": 4},
    {"users": 16, "turns": 4, "prefix": 512, "pool": 12288},
)


test_each_challenge_can_be_met_but_by_no_other_knob_alone = harness.solution_test(widget, last, SOLVED)


@pytest.mark.parametrize(
    ("index", "values", "advice"),
    [
        (0, {"pool": 4096}, "Raise the pool (now 4K)"),
        (0, {"pool": 12288, "users": 2}, 'put "Users" back'),
        (1, {"kind": "chat"}, "every turn's tokens are new"),
        (1, {"kind": "system", "users": 16}, "too much for 48 requests"),
        (2, {"kind": "chat", "users": 16}, 'Set "They share" to "a document each"'),
        (2, {"users": 16, "pool": 12288}, "Shorten the prefix or raise the pool (now 12K)"),
        (2, {"users": 16, "pool": 12288, "prefix": 256, "turns": 4}, "Raise the turns or the prefix"),
        (2, {"users": 16, "pool": 12288, "prefix": 512, "turns": 4, "order": "at random"}, ""),
    ],
)
def test_advice_names_the_knob_that_is_wrong(index: int, values: dict, advice: str):
    progress = widget.CHALLENGES[index].check(last(**values))
    assert progress.met == (not advice)
    assert advice in progress.advice


def test_the_guess_is_right():
    state = last()
    assert widget.GUESS.options[widget.GUESS.right] == "nothing"
    assert state.hit_rate == 0
    assert widget.GUESS.options[0].startswith(f"{state.endless_rate * 100:.0f} %")
    assert (state.users, state.pool // 1024) == (8, 6)
    assert round(state.endless_rate * 0.75 * 100) == 48


# ---- what it means elsewhere, and the reader's own code


def test_the_lessons_own_hashes_change_nothing():
    own = load(LESSON).hash_block_tokens
    mine = Session(widget.SPEC, hash_block_tokens=own, pool=8192)
    assert mine.settle()["words"] == Session(widget.SPEC, pool=8192).settle()["words"]
    assert mine.state.cells[16, 2048].wrong == (0,) * 48


def test_hashes_without_the_parent_are_seen_to_find_other_texts():
    def without_the_parent(_parent, token_ids, extra_keys=b""):
        return hash_block_tokens(bytes(32), token_ids, extra_keys)

    view = Session(widget.SPEC, hash_block_tokens=without_the_parent, pool=12288).settle()
    assert view["tone"] == "broken"
    assert "Your hashes lead to wrong blocks" in view["words"]
    for sign in ("✕ 65<", ">of another text<", "in blocks of another text"):
        assert sign in view["svg"]
    assert not any(challenge["met"] for challenge in view["challenges"])


test_hashes_that_fail_or_never_come_are_reported = harness.own_code_test(
    widget.SPEC,
    [
        (lambda *_: 5, "bytes"),
        (lambda *_: [].pop(), "Your hash_block_tokens broke"),
        (harness.endless, "did not return"),
    ],
    "widgets.prefix_caching.state.PATIENCE",
)
