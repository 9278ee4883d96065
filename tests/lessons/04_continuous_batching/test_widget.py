"""Lesson 04's widget breaks where queueing theory says, and its picture shows what the scheduler
decided.
"""

import re
import statistics
import xml.etree.ElementTree as ET
from functools import lru_cache, partial
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import quiet_seconds
from refusals import assert_refused

from lessons import widget_harness as harness
from minivllm_lab.exercise import load as load_lesson
from widgets import continuous_batching as widget
from widgets.continuous_batching import curves, runs
from widgets.continuous_batching.curves import LOADS, Curve
from widgets.shell.session import Session

complete = widget.SPEC.complete
KNOBS = widget.SPEC.flat()
RUNS = {name: st.sampled_from(KNOBS[name].places()) for name in ("seats", "spread", "burstiness")}
SIX_LOADS = (0.1, 0.3, 0.6, 0.9, 1.2, 1.5)
POSITIONS = st.tuples(st.sampled_from(SIX_LOADS), st.sampled_from(KNOBS["limit"].places()))
SOLUTIONS = {"load": 0.3}, {"load": 0.8, "spread": 0.0}, {"load": 0.6, "spread": 0.5, "seats": 4}


here = partial(harness.known_state, widget)


def ceiling_of(curve: Curve) -> float:
    assert curve.ceiling is not None
    return curve.ceiling


# ---- theory


@pytest.mark.parametrize(("seats", "spread"), [(1, 1.0), (8, 0.0), (16, 1.0)])
def test_a_load_above_1_is_broken_at_every_seat_count_and_under_both_policies(seats: int, spread: float):
    state = here(load=1.1, seats=seats, spread=spread, limit=5.0)
    assert [curve.queue_grows(load) for curve in state.curves for load in (1.1, 1.5)] == [True] * 4
    assert widget.verdict(state).tone == "broken"
    assert "no policy helps" in widget.verdict(state).words


@pytest.mark.parametrize(("seats", "spread"), [(1, 1.0), (4, 0.0), (8, 0.5), (16, 1.5)])
def test_each_queue_begins_to_grow_where_theory_says(seats: int, spread: float):
    """Static batching breaks at mean / mean longest of a batch, continuous at 1; lengths decide,
    not hardware.
    """
    experiment = runs.experiment(seats, spread, 1.0)
    for policy in runs.POLICIES:
        list(experiment.run(policy, runs.SATURATED))
    outputs = experiment.outputs
    longest = [max(outputs[index : index + seats]) for index in range(0, len(outputs), seats)]
    formula = statistics.mean(outputs) / statistics.mean(longest)
    assert experiment.ceiling("static") == pytest.approx(formula, rel=0.03)
    assert experiment.ceiling("continuous") == pytest.approx(1.0, abs=0.01)


def test_beyond_its_ceiling_a_queue_grows_with_the_load_and_below_it_stays_short():
    for curve in complete().curves:
        assert curve.ceiling is not None
        for load in LOADS:
            if load > curve.ceiling + 0.05:  # those that such a server cannot have served when the last one comes
                assert curve.points[load].queue == pytest.approx(runs.REQUESTS * (1 - curve.ceiling / load), abs=40)
            if load < curve.ceiling - 0.05:
                assert curve.points[load].queue < 20


def test_every_point_is_400_requests_and_both_policies_serve_the_same_arrivals():
    state = complete()
    assert all(len(point.ttfts) == 400 for curve in state.curves for point in curve.points.values())
    assert set(state.curves[0].points) == set(state.curves[1].points) == set(LOADS)
    by_policy = [{stay.request: stay.start - stay.waited for stay in curve.stretch.stays} for curve in state.curves]
    shared = by_policy[0].keys() & by_policy[1].keys()
    assert len(shared) > 5
    assert all(by_policy[0][load] == pytest.approx(by_policy[1][load]) for load in shared)


@mock.patch.object(curves, "LOADS", SIX_LOADS)
def test_the_lengths_of_a_workload_replace_the_spread():
    state = complete(file="azure-code")
    assert "divided by" in state.note
    assert "prompts cut" in state.note
    assert state.note in " ".join(ET.fromstring(widget.figure(state, 760)).itertext())
    assert state.curves[0].ceiling == pytest.approx(state.formula, rel=0.08)
    again = here(file=" azure-code ", spread=0.25).curves[0].points
    assert again
    assert again.items() <= state.curves[0].points.items()
    assert_refused("nonsense", complete, file="nonsense")


# ---- the start, the guess, the challenges


def test_the_start_shows_static_beyond_its_knee_while_continuous_is_fine():
    state = complete()
    static, continuous = state.curves
    assert static.broken(state.load)
    assert static.queue_grows(state.load)
    assert not continuous.broken(state.load)
    assert widget.verdict(state).tone == "broken"


def test_the_right_guess_is_where_the_queue_begins_to_grow_and_the_share_of_the_seats_that_are_used():
    state = complete()
    static, continuous = map(ceiling_of, state.curves)
    assert widget.GUESS.options[widget.GUESS.right] == f"{static:.2f}"
    assert continuous == 1
    picture = " ".join(ET.fromstring(widget.figure(state)).itertext())
    assert f"static: queue grows from {static:.2f}" in picture
    assert f"a full batch uses {static:.2f} of its seats" in picture
    outputs = runs.experiment(8, 1.0, 1.0).outputs
    longest = statistics.mean(max(outputs[index : index + 8]) for index in range(0, 400, 8))
    assert f"{longest / statistics.mean(outputs):.1f} times" in widget.GUESS.question


@pytest.mark.parametrize("index", range(3))
def test_each_challenge_can_be_met_and_not_by_one_key_but_the_first(index: int):
    check, solution = widget.CHALLENGES[index].check, SOLUTIONS[index]
    solved = check(here(**solution))
    assert solved.met
    assert not solved.advice
    for name in solution:
        without = check(here(**solution | {name: widget.START[name]}))
        assert not without.met
        assert without.advice


# ---- the picture


@given(**RUNS, positions=st.lists(POSITIONS, min_size=3, max_size=3))
@settings(max_examples=3, deadline=None)
@mock.patch.object(curves, "LOADS", SIX_LOADS)
def test_every_position_of_the_knobs_is_drawn(positions, **knobs):
    """Loads and service levels need no runs other than those already there."""
    for load, limit in positions:
        states = list(widget.sweep(**knobs, load=load, limit=limit))
        for state, width in ((states[0], 640), (states[-1], 400), (states[-1], 640)):
            harness.marks_drawn(widget.SPEC, state, width)
            backwards = r'width="-|height="-|d="[^"]*--|h-[^z]*v'
            assert not re.search(backwards, widget.figure(state, width)), "no shape runs backwards"
        last, said = states[-1], widget.verdict(states[-1])
        broken = [curve.broken(last.load) for curve in last.curves]
        assert said.tone == ("broken" if any(broken) else "fine")
        for sentence in said.words.split(". "):
            assert not ("cannot keep up" in sentence and "within" in sentence), "the run is too short to say so"
        assert last.complete
        assert "nan" not in said.words


# ---- how it runs


@mock.patch.object(curves, "LOADS", SIX_LOADS)
def test_runs_that_were_left_are_taken_up_again_and_give_the_same(monkeypatch):
    expected = complete().curves
    monkeypatch.setattr(curves, "experiment", lru_cache(runs.experiment.__wrapped__))
    for _ in range(300):  # as when the load is dragged: each sweep is left after three steps
        states = widget.sweep()
        for _ in range(3):
            last = next(states, None)
        if last is None or last.complete:
            break
    state = complete()
    assert [curve.points for curve in state.curves] == [curve.points for curve in expected]


# ---- the reader's own schedule


@pytest.fixture(scope="module")
def lesson():
    return load_lesson("vllm/04_continuous_batching.py")


@mock.patch.object(curves, "LOADS", SIX_LOADS)
def test_the_lessons_own_schedule_gives_the_curve_of_continuous_batching(lesson):
    mine, ours = complete(schedule=lesson.schedule).curves[1], complete().curves[1]
    assert mine.name == "yours"
    assert mine.points == ours.points
    assert mine.ceiling == ours.ceiling
    assert "yours" in widget.figure(complete(schedule=lesson.schedule))


def test_a_schedule_that_admits_into_an_empty_batch_only_breaks_where_static_does(lesson):
    def shut(running, waiting, pool, token_budget, chunk_limit, max_num_seqs):
        places = len(running) if running else max_num_seqs
        return lesson.schedule(running, waiting, pool, token_budget, chunk_limit, places)

    for load in (1.2, 0.7):
        state = here(schedule=shut, load=load)
    static, yours = state.curves
    assert len(yours.points) == 2
    assert yours.points.items() <= static.points.items()
    assert widget.verdict(state).tone == "broken"
    assert "Your schedule cannot keep up" in widget.verdict(state).words


def test_a_schedule_that_forgets_the_slots_is_seen(lesson):
    def greedy(running, waiting, pool, token_budget, chunk_limit, max_num_seqs):
        return lesson.schedule(running, waiting, pool, token_budget, chunk_limit, 300)

    state = here(schedule=greedy, load=1.2)
    assert widget.verdict(state).tone == "broken"
    assert "requests run at once, but max_num_seqs is 8" in widget.verdict(state).words
    ET.fromstring(widget.figure(state))


@pytest.mark.parametrize(
    ("schedule", "words"), [(harness.endless, "did not return"), (lambda *_: {}, "gives no request a token")]
)
def test_a_schedule_that_leads_nowhere_is_stopped_and_told_why(schedule, words, monkeypatch):
    monkeypatch.setattr(runs, "PATIENCE", 0.2)
    session = Session(widget.SPEC, schedule=schedule)
    assert quiet_seconds(session.settle) < 5
    for view in (session.settle(), session.settle(load=0.8)):  # again, at the next turn of a knob
        assert words in view["words"]
        assert view["tone"] == "broken"
