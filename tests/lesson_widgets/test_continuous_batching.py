"""Lesson 04's widget shows what the scheduler decides, and breaks where it should."""

import statistics
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from widgets import continuous_batching as widget

STATIC = {"policy": "static"}
MET = {"policy": "static", "slots": 8, "spread": 1.5, "load": 0.9}


@given(
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from(widget.POLICIES),
    st.sampled_from([0.25, 1.0, 16.0]),
)
@settings(max_examples=25, deadline=None)
def test_every_position_of_the_knobs_is_drawn(load, spread, slots, policy, burstiness):
    state = widget.sweep(load, spread, slots, policy, burstiness)
    ET.fromstring(widget.figure(state))
    assert widget.verdict(state).words
    assert 0 < state.utilization <= 1
    served = {who for row in state.rows for who in row if who}
    assert served == {str(index) for index in range(widget.REQUESTS)}
    if policy == "continuous":
        assert state.waiting_utilization == 1.0, "no slot is empty while somebody waits"


def test_the_rows_hold_what_the_requests_asked_for():
    """A request sits for as many steps as it generates tokens: its prompt fits into its first step."""
    state = widget.sweep(spread=1.0, slots=4, policy="continuous")
    lengths = widget._lengths(1.0)
    sat = [sum(row.count(str(index)) for row in state.rows) for index in range(widget.REQUESTS)]
    assert sat == list(lengths)
    assert statistics.mean(lengths) == pytest.approx(widget.MEAN_OUTPUT, rel=0.25)


def test_requests_that_are_all_alike_leave_no_gap_in_a_full_static_batch():
    state = widget.sweep(load=2.0, spread=0.0, slots=4, policy="static")
    assert state.formula == 1.0
    assert state.waiting_utilization > 0.9


@pytest.mark.parametrize("slots", [2, 4, 8])
def test_continuous_batching_uses_more_of_its_slots_and_waits_less(slots):
    static, continuous = (widget.sweep(load=0.8, slots=slots, policy=policy) for policy in widget.POLICIES)
    assert continuous.utilization > static.utilization
    assert continuous.median_wait < static.median_wait
    assert continuous.seconds < static.seconds


def test_above_capacity_no_policy_helps():
    state = widget.sweep(load=2.0, policy="continuous")
    assert widget.verdict(state).tone == "broken"
    assert "does not drain" in widget.verdict(state).words
    assert widget.verdict(widget.sweep(load=0.5, policy="continuous")).tone == "fine"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (STATIC, ["4 slots, static batching", "empty while somebody waits", "Requests that wait"]),
        ({"policy": "continuous"}, ["4 slots, continuous batching", "the last one arrives", "in use while"]),
    ],
)
def test_the_picture_says_what_happens(knobs: dict, words: list[str]):
    picture = widget.figure(widget.sweep(**knobs))
    assert [word for word in words if word not in picture] == []


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"load": 0.0}, "load"),
        ({"slots": 0}, "slots"),
        ({"spread": -1.0}, "spread"),
        ({"policy": "magic"}, "magic"),
        ({"burstiness": 0.0}, "burstiness"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs: dict, words: str):
    with pytest.raises(MinivllmError, match=words):
        widget.sweep(**knobs)


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = widget.show()
    assert "Not yet." in shown.progress.value
    shown.set(**MET)
    assert "Met." in shown.progress.value
    shown.set(policy="continuous")
    assert "Not yet." in shown.progress.value
