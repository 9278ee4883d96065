"""Lesson 06's widget breaks where the requests' work says it must, and says which layout to pick
when.
"""

import asyncio
import itertools
import math
import xml.etree.ElementTree as ET
from collections import deque
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from lessons import widget_harness as harness
from minivllm_lab.exercise import load as load_lesson
from minivllm_simulate.layouts import Layout
from widgets import serving as widget
from widgets.serving import runs
from widgets.serving.figure import drawn_rates, tpot_at
from widgets.serving.reader import PAUSES, read_answer
from widgets.serving.state import Served, layouts
from widgets.shell.session import Session

complete = widget.SPEC.complete
H100 = {"model": "Llama-3.1-8B", "gpu": "H100"}
POINT = runs.Point((0.01, 0.02), (0.005, 0.006), 0.0, 1.0)
FEW = {"prompt": 64, "output": 16}
"""Short requests, whose runs cost little."""


here = partial(harness.known_state, widget)


def compared(**knobs) -> widget.State:
    """Return the first state that knows where every layout breaks."""
    return next(state for state in widget.sweep(**knobs) if all(other.is_found for other in state.others))


def goodputs(state: widget.State) -> dict[str, float]:
    return {str(other.layout): other.goodput for other in state.others}


# ---- theory


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 4)])
def test_no_layout_handles_more_than_its_mean_work_allows(tp: int, dp: int):
    """However loose the service level, rate × mean work > capacity breaks, and half of it does not."""
    state = here(tp=tp, dp=dp, ttft=1000.0, tpot=1000.0, rate=1.0)
    capacity = runs.experiment(**H100, layout=state.layout, work=state.work).steady.capacity() * dp
    assert state.served.knee is not None
    assert state.served.knee.cause == "queue"
    assert state.served.knee.rate == pytest.approx(capacity, rel=0.15)
    for rate in (rate for rate in runs.RATES if rate in state.served.points):
        assert (
            state.served.causes(rate)
            if rate > 1.15 * capacity
            else rate > 0.85 * capacity or not state.served.causes(rate)
        )


def test_tensor_parallel_gives_tokens_sooner_and_replicas_handle_more():
    alone = {tp: here(tp=tp, dp=4 // tp, rate=0.5).served.points[0.5].tpot[0] for tp in (1, 2, 4)}
    assert alone[4] < 0.7 * alone[2] < 0.7 * 0.85 * alone[1] * 1.2
    tight, loose = goodputs(compared(tpot=0.005)), goodputs(compared(tpot=0.05))
    assert max(tight, key=tight.__getitem__) == "TP 4 × DP 1"
    assert max(loose, key=loose.__getitem__) == "TP 1 × DP 4"


def test_what_does_not_fit_is_broken_at_every_rate_and_says_why():
    state = here(model="Meta-Llama-3-70B", tp=1, dp=8)
    assert widget.verdict(state).tone == "broken"
    assert "131.4 GiB" in widget.verdict(state).words
    assert "does not fit" in widget.figure(state)
    assert "refuses to start" in widget.command(state)
    assert state.served.goodput == 0


# ---- the search for a knee


def test_the_knee_that_is_searched_is_that_of_the_whole_curve():
    state = complete(tp=4, dp=1)
    knee = state.served.knee
    assert knee is not None
    below = [rate for rate in state.served.rates if rate < knee.rate]
    above = [rate for rate in state.served.rates if rate > knee.rate]
    assert not any(state.served.causes(rate) for rate in below)
    assert all(state.served.causes(rate) for rate in above)
    assert runs.RATES.index(above[0]) == runs.RATES.index(below[-1]) + 1


def test_a_knee_is_not_told_before_it_is_known():
    slow = runs.Point((0.01, 0.02), (0.005, 0.02), 0.0, 1.0)
    for points, is_found in (
        ({}, False),
        ({10.0: POINT}, False),
        ({10.0: POINT, 20.0: slow}, False),
        ({10.0: POINT, 15.0: slow}, True),
        ({1.0: slow}, False),
        ({0.5: slow}, True),
        ({1000.0: POINT}, True),
    ):
        served = Served(Layout(1, 1, 1), points, "", 0.5, 0.01)
        assert served.is_found is is_found, points
        assert is_found or served.knee is None
    knee = Served(Layout(1, 1, 1), {10.0: POINT, 15.0: slow}, "", 0.5, 0.01).knee
    assert knee is not None
    assert 10 < knee.rate < 15
    assert knee.cause == "tpot"


def test_layouts_use_the_same_number_of_gpus_and_hold_the_readers_own():
    for tp, pp, dp in itertools.product(widget.TPS, widget.PPS, widget.DPS):
        result = layouts(Layout(tp, pp, dp))
        assert {layout.gpus for layout in result} == {tp * pp * dp}
        assert Layout(tp, pp, dp) in result
        assert len(set(result)) == len(result) <= 5


def test_the_other_layouts_are_drawn_too():
    state = list(widget.sweep())[-1]
    assert len(state.others) == 3
    for layout in state.others:
        rates = drawn_rates(layout)
        assert min(rates) == runs.RATES[0]
        assert sum(rate < layout.goodput for rate in rates) > 3
    pictures = [widget.figure(state, width) for width in (390, 640)]
    assert all(f">{other.layout}</text>" in picture for other in state.others for picture in pictures)
    queues = [layout.queue_grows_from for layout in state.others]
    assert queues == sorted(queues) == [layout.goodput for layout in compared(tpot=0.025).others], "DP wins"


def test_a_curve_ends_where_the_queue_begins_to_grow():
    """Beyond it, runs of equally many requests are too short for their latencies to mean anything."""
    growing = runs.Point((0.01, 0.02), (0.005, 0.006), 0.5, 1.0)
    points = {10.0: POINT, 15.0: POINT, 20.0: growing, 30.0: growing}
    served = Served(Layout(1, 1, 1), points, "", 0.5, 0.01)
    assert drawn_rates(served) == [10.0, 15.0]
    assert [tpot_at(served, rate) for rate in (5.0, 12.0, 15.0, 25.0)] == [None, 0.006, 0.006, math.inf]
    assert drawn_rates(Served(Layout(1, 1, 1), {10.0: POINT}, "", 0.5, 0.01)) == [10.0]


def test_more_gpus_in_an_engine_share_the_weights_and_pay_for_it_with_all_reduces():
    work, alone, pair = runs.Work(512, 128), Layout(1, 1, 1), Layout(2, 1, 1)
    one, two = (runs.experiment(**H100, layout=layout, work=work).parts(10.0, 0.01) for layout in (alone, pair))
    assert (one[0], one[2], sum(one)) == (two[0], 0, pytest.approx(sum(two)))
    assert one[1] > 1.9 * two[1] > 0 < two[2]


# ---- the start, the guess, the challenges


def test_the_right_guess_is_the_best_layout_at_the_start():
    state = compared()
    best, second, *_ = sorted(state.others, key=lambda layout: -layout.goodput)
    assert str(best.layout) in widget.GUESS.options[widget.GUESS.right]
    assert best.goodput > 1.1 * second.goodput
    experiment = runs.experiment(**H100, layout=state.layout, work=state.work)
    _, weights, *_ = experiment.parts(state.rate, 0.0075)
    assert f"{weights * 1e3:.1f} of the 7.5 ms" in widget.GUESS.because


SOLUTIONS = (
    {"tp": 8, "dp": 1, "prompt": 2048, "ttft": 0.05, "rate": 5.0},
    {"tp": 1, "dp": 8, "tpot": 0.025, "rate": 300.0},
    {"tp": 8, "dp": 1, "tpot": 0.025, "rate": 20.0, "model": "Meta-Llama-3-70B"},
)


test_each_challenge_can_be_met_and_by_the_layout_that_it_is_about = harness.challenge_test(
    widget, here, SOLUTIONS, [(0, {"tp": 1, "dp": 8}), (1, {"tp": 8, "dp": 1}), (2, {"tp": 1, "dp": 8})]
)


test_advice_names_the_knob_that_is_wrong = harness.advice_test(
    widget,
    [
        (0, {"gpu": "B200"}, "Use an H100"), (0, {}, "Raise the prompt to 2,048 (now 512)"),
        (0, {"prompt": 2048}, "Lower the TTFT limit to 50 ms (now 500 ms)"),
        (1, {"file": "alpaca"}, "Clear your own lengths"), (1, {}, "Raise the rate to 300 (now 50)"),
        (2, {}, "Use Meta-Llama-3-70B"), (2, {"model": "Meta-Llama-3-70B", "rate": 20.0}, "Raise TP"),
    ],
)  # fmt: skip


# ---- the picture and the command


def test_the_command_serves_the_layout_and_loads_it_so():
    said = widget.command(here(tp=2, dp=2, pp=2, rate=20.0, **FEW))
    assert said.splitlines()[-1].startswith("vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 --pipeline")
    assert "--pipeline-parallel-size 2 --data-parallel-size 2" in said
    assert "--random-input-len 64 --random-output-len 16 --ignore-eos" in said
    assert "--request-rate 20 " in said
    assert "--goodput ttft:500 tpot:7.5" in said


def test_lengths_of_a_file_replace_those_of_the_knobs():
    state = here(file=" alpaca ")
    assert state.work.note in " ".join(ET.fromstring(widget.figure(state, 760)).itertext())
    assert state.served.points == here(file="alpaca", prompt=64).served.points
    assert_refused("nonsense", widget.sweep, file="nonsense")


# ---- the reader's own collector


@pytest.fixture(scope="module")
def lesson():
    return load_lesson("vllm/06_serving.py")


def test_the_lessons_own_collector_gives_the_events_of_one_that_merges(lesson):
    for pause in PAUSES:
        mine, ours = (read_answer(128, 0.007, pause, own) for own in (lesson.RequestOutputCollector, None))
        assert mine.tokens == ours.tokens == 128
        assert mine.events == pytest.approx(ours.events, abs=1)
    view = Session(widget.SPEC, output_collector=lesson.RequestOutputCollector).settle()
    assert view["tone"] == Session(widget.SPEC).settle()["tone"]
    assert "your collector" in view["svg"]


def test_events_are_the_time_of_the_answer_over_the_pause():
    assert read_answer(100, 0.01, 0.001).events == 100
    assert read_answer(100, 0.01, 0.1).events == pytest.approx(100 * 0.01 / 0.1, abs=2)
    assert read_answer(100, 0.01, 10.0).events == 2


class Queued:
    """A collector that joins nothing."""

    def __init__(self):
        self.kept, self.there = deque(), asyncio.Event()

    def put(self, output):
        self.kept.append(output)
        self.there.set()

    async def get(self):
        while not self.kept:
            self.there.clear()
            await self.there.wait()
        return self.kept.popleft()


class Latest(Queued):
    """A collector that keeps only the last output."""

    def put(self, output):
        self.kept.clear()
        super().put(output)


class Asleep(Queued):
    """A collector that never wakes its reader."""

    def put(self, output):
        self.kept.append(output)


class Nothing(Queued):
    async def get(self):
        await super().get()


test_a_collector_that_is_wrong_is_told_why = harness.own_code_test(
    widget.SPEC,
    [
        (Queued, "merge what the client"),
        (Latest, "of 128 tokens to a client"),
        (Asleep, "wake"),
        (Nothing, "returns None, which is not an output"),
    ],
)


# ---- the law that binds rate and gap


@given(
    gpu=st.sampled_from(("H100", "A100", "L4")),
    layout=st.builds(Layout, st.sampled_from((1, 2, 4)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4))),
    work=st.builds(runs.Work, st.sampled_from((16, 64, 256, 1024)), st.sampled_from((2, 4, 16, 64))),
    rate=st.sampled_from(runs.RATES),
)
@settings(max_examples=6, deadline=None)
def test_rate_times_gap_is_at_most_the_number_of_seats(gpu, layout, work, rate):
    """A request holds its seat during its gaps, and an answer of n tokens has n - 1 of them.

    This holds only where the run keeps up: in overload the rate is that of the whole run, and the
    gaps are those of its beginning.
    """
    experiment = runs.experiment("Llama-3.1-8B", gpu, layout, work)
    assume(not experiment.refused)
    for _ in experiment.run(rate):
        pass
    point = experiment.runs.found[rate]
    assume(point.requests_per_second >= 0.9 * rate)
    gaps_per_second = point.requests_per_second * (work.output - 1)
    assert gaps_per_second * point.tpot[0] <= 1.02 * layout.groups * experiment._placed.places
