"""Lesson 02's widget: the picture is the engine's pool, its figures are counted, it breaks where it should."""

import json
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.block_pool import BlockPool
from minivllm.errors import MinivllmError
from minivllm.simulate.workloads import WORKLOADS, RequestLengths
from widgets import paged_attention

TOO_LARGE = {"block_size": 512, "requests": "alpaca"}
SHARED = {"requests": "azure-code", "samples": 8}
NOTHING_FITS = {"block_size": 512, "samples": 8, "slots": 2048, "share": False}


@given(
    st.sampled_from(paged_attention.BLOCK_SIZES),
    st.sampled_from(sorted(WORKLOADS)),
    st.sampled_from(paged_attention.SAMPLES),
    st.booleans(),
    st.sampled_from(paged_attention.POOLS),
)
@settings(max_examples=30, deadline=None)
def test_every_position_of_the_knobs_adds_up_and_is_drawn(block_size, requests, samples, share, slots):
    state = paged_attention.sweep(block_size, requests, samples, share, slots)
    assert len(state.cells) == slots // block_size + 1
    assert state.cells[0].owner is None
    assert sum(cell.ref_cnt for cell in state.cells) == state.table_entries, "every table entry is a counted reference"
    assert sum(cell.filled for cell in state.cells) == state.tokens
    for cell in state.cells[1:]:
        assert (cell.owner is None) == (cell.ref_cnt == 0) == (cell.filled == 0)
        assert cell.ref_cnt in (0, 1, samples)
    assert len({cell.owner for cell in state.cells} - {None}) == state.requests
    assert share or samples == 1 or state.saved == 0
    ET.fromstring(paged_attention.figure(state))
    assert paged_attention.verdict(state).words


def test_the_pool_is_the_engines(monkeypatch: pytest.MonkeyPatch):
    taken = []
    take = BlockPool.get_new_blocks
    monkeypatch.setattr(BlockPool, "get_new_blocks", lambda pool, count: taken.append(count) or take(pool, count))
    state = paged_attention.sweep()
    assert sum(taken) >= state.held > 0


def test_a_request_is_served_block_by_block():
    """A prompt of 6 tokens, 5 answers' tokens, 2 samples, blocks of 4: one block shared, one each, then two each."""
    server = paged_attention._Server(8, 4, samples=2, share=True)
    request = paged_attention._Request(0, RequestLengths(6, 5))
    assert server.admit(request)
    assert [len(request.shared), *map(len, request.own)] == [1, 1, 1]
    assert [block.ref_cnt for block in request.shared] == [2]
    waiting = paged_attention.deque()
    server.tick(waiting, 2)
    assert [len(request.shared), *map(len, request.own)] == [1, 2, 2]
    server.tick(waiting, 2)
    assert server.pool.get_num_free_blocks() == 8, "it is finished, and every block is back"


def test_the_last_one_gives_way_and_comes_back():
    state = paged_attention.sweep(slots=2048)
    assert state.evicted > 0
    assert state.used > 0.7


def test_what_is_expected_is_near_what_is_seen():
    for requests in WORKLOADS:
        states = [paged_attention.sweep(block_size=size, requests=requests, slots=16384) for size in (16, 128)]
        for state in states:
            assert state.empty == pytest.approx(state.empty_by_size[state.block_size], abs=0.1)


@pytest.mark.parametrize(
    ("knobs", "words", "tone"),
    [
        ({}, ["512 blocks of 16 slots", "run at once; 4 if", "hold a token", "block size"], "fine"),
        (TOO_LARGE, ["16 blocks of 512 slots"], "broken"),
        (NOTHING_FITS, ["4 blocks of 512 slots"], "broken"),
        (SHARED, ["dot: samples share it", "by sharing"], "fine"),
        ({"block_size": 1}, ["8,192 blocks of 1 slots"], None),
    ],
)
def test_the_picture_says_what_happens(knobs: dict, words: list[str], tone: str | None):
    state = paged_attention.sweep(**knobs)
    picture = paged_attention.figure(state)
    assert [word for word in words if word not in picture] == []
    assert tone is None or paged_attention.verdict(state).tone == tone


def test_a_block_says_who_holds_it():
    state = paged_attention.sweep(**SHARED)
    picture = paged_attention.figure(state)
    block_id = next(number for number, cell in enumerate(state.cells) if cell.ref_cnt == 8)
    owner = state.cells[block_id].owner
    assert owner is not None
    assert f"block {block_id}: request {owner + 1}, held by 8 samples, 16 of 16 slots" in picture


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"samples": -1}, "samples must be at least 1"),
        ({"block_size": 64, "slots": 32}, "32 slots has no block of 64"),
        ({"requests": "poems"}, "poems"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs: dict, words: str):
    with pytest.raises(MinivllmError, match=words):
        paged_attention.sweep(**knobs)


def test_the_measured_price_is_what_the_lesson_left():
    where, price = paged_attention._prices()
    (path, *_) = sorted(paged_attention.RESULTS.glob("02_paged_attention.*.json"))
    ratio = json.loads(path.read_text())["figures"]["blocks"]["price"]["ratio"]
    assert price == {int(size): value for size, value in ratio.items()}
    assert set(price) == set(paged_attention.BLOCK_SIZES)
    assert where
    assert f"as measured on {where}" in paged_attention.figure(paged_attention.sweep())


def test_without_results_there_is_no_price(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged_attention, "_prices", lambda: ("", {}))
    picture = paged_attention.figure(paged_attention.sweep())
    assert "time of attention" not in picture


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = paged_attention.show()
    assert "Not yet." in shown.progress.value
    shown.set(**SHARED)
    assert "Met." in shown.progress.value
    shown.set(share=False)
    assert "Not yet." in shown.progress.value


@pytest.mark.parametrize("knobs", [NOTHING_FITS, TOO_LARGE, {"samples": 8, "requests": "alpaca"}])
def test_the_challenge_is_not_met_by_accident(knobs: dict):
    assert not paged_attention.CHALLENGE.check(paged_attention.sweep(**knobs)).met
