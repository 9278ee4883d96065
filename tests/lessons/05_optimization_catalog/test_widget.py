"""Lesson 05's levers: both orders agree with the lever model, and the point where a server breaks
is drawn and stated.
"""

import inspect
import math
from functools import cache
from itertools import accumulate
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lessons import widget_harness as harness
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import LADDER, LeverResult, Levers, throughput
from widgets import optimization_catalog as widget
from widgets.optimization_catalog import runs
from widgets.optimization_catalog.figure import _known, breaks

ALL_OFF = dict.fromkeys(runs.FIELDS, False)
ALL_ON = dict.fromkeys(runs.FIELDS, True)
KEPT = "kv_cache", "continuous_batching", "weight_bits", "speculative_tokens", "tensor_parallel"
FIVE = ALL_OFF | dict.fromkeys(KEPT, True)
FEW: dict = {"_RUNS": {}, "_workload": cache(runs._workload.__wrapped__)}
"""Replacements for the caches that hold the other tests' runs: fewer requests are drawn the same way."""
complete = widget.SPEC.complete
LEVERS = st.fixed_dictionaries(dict.fromkeys(runs.FIELDS, st.booleans()))


# What is run


def test_the_ranking_is_the_simulators_ladder():
    state = complete(**ALL_ON)
    work = runs._workload("chats", state.slots)
    steps = accumulate(LADDER, lambda levers, rung: rung.pull(levers), initial=Levers())
    expected = [throughput(levers, known_model(runs.MODEL), get_hardware("L4"), work) for levers in steps]
    assert state.nothing == expected[0]
    assert [row.steps[0].after for row in state.rows] == expected[1:]
    switches = [widget.SPEC.flat()[row.field].label for row in state.rows]
    assert [row.title.lower() for row in state.rows] == [label.lower() for label in switches]


def test_the_reverse_pulls_the_same_levers_from_the_end_and_both_end_alike():
    state = complete(**ALL_ON)
    levers, work = Levers(), runs._workload("chats", state.slots)
    for rung, row in zip(reversed(LADDER), reversed(state.rows), strict=True):
        before, levers = levers, rung.pull(levers)
        got = [throughput(item, known_model(runs.MODEL), get_hardware("L4"), work) for item in (before, levers)]
        assert list(row.steps[1]) == got
    assert state.rows[0].steps[1].after == state.rows[-1].steps[0].after == state.everything


@given(
    LEVERS, st.sampled_from(runs.GPUS), st.sampled_from([*runs.REQUESTS]), st.sampled_from((1, 8)),
    st.sampled_from(runs.LEVELS), st.sampled_from((360, 559, 560, 640, 760)),
)  # fmt: skip
@settings(max_examples=6, deadline=None)
def test_every_position_of_the_knobs_is_drawn_and_told(levers, gpu, requests, slots, level, width):
    with mock.patch.multiple(runs, FEWEST_REQUESTS=4, WAVES=1, **FEW):
        state = complete(gpu=gpu, requests=requests, slots=slots, level=level, **levers)
    assert state.complete
    for reverse in (False, True):
        factors = [state.factor(row.field, reverse) for row in state.on]
        if isinstance(state.nothing, LeverResult) and None not in factors:
            assert isinstance(state.everything, LeverResult)
            assert state.everything.tokens_per_second == pytest.approx(
                math.prod(factor or 0 for factor in factors) * state.nothing.tokens_per_second
            )
    said = widget.verdict(state)
    assert (said.tone == "broken") == bool(state.trouble(state.everything))
    harness.marks_drawn(widget.SPEC, state, width)
    for challenge in widget.CHALLENGES:
        assert challenge.check(state).words


def test_states_become_more_complete_and_nothing_is_run_twice():
    runs._RUNS.clear()
    swept = runs.sweep(gpu="A100", slots=8)
    assert inspect.isgenerator(swept)
    states = list(swept)
    first = states[0]
    assert isinstance(first.everything, LeverResult)
    assert isinstance(first.nothing, LeverResult)
    assert not first.complete
    known = [sum(run is not None for run in state.by_slots) for state in states]
    assert known == sorted(known)
    assert states[-1].complete
    assert isinstance(runs.sweep(gpu="A100", slots=8), runs.State), "all its runs are known"
    assert isinstance(runs.sweep(gpu="A100", slots=8, level=10), runs.State), "a level needs no run"


# Held against theory


@pytest.mark.parametrize(
    ("knobs", "trouble"),
    [
        ({}, "late"),  # 22.5 ms
        ({"level": 30}, ""),
        ({"level": 30, "slots": 48}, "late"),  # 41 ms
        ({"speculative_tokens": False}, "late"),  # a token a step, and steps of 42 ms
        ({"weight_bits": False}, "late"),  # 15 GiB at 300 GB/s are 54 ms a step
        ({"gpu": "H100", "weight_bits": False}, ""),
        (widget.PRESETS["Cache full"], "preempts"),
        (widget.PRESETS["Does not start"], "refused"),
        ({**widget.PRESETS["Does not start"], "gpu": "H100", "level": 200}, ""),
    ],
)
def test_verdicts_against_configurations_whose_outcome_is_known(knobs, trouble):
    state = complete(**knobs)
    assert state.trouble(state.everything) == trouble
    said = widget.verdict(state)
    assert (said.tone == "broken") == bool(trouble)
    words = {"late": "the limit is", "preempts": "preemptions", "refused": "does not start", "": "tokens/s"}
    assert words[trouble] in said.words
    causes = {"late": "too slow", "preempts": "preemptions: the KV cache is full"}
    assert causes.get(trouble, "") in widget.figure(state)


def test_what_a_lever_needs_decides_what_it_buys():
    state = complete()
    assert state.factor("kv_cache", reverse=True) > 10 * state.factor("kv_cache")  # pyright: ignore
    for field in ("paging", "prefix_caching"):
        assert state.factor(field) > 1.05  # pyright: ignore
        assert state.factor(field, reverse=True) == pytest.approx(1), f"{field} has no cache to act on"
    assert state.factor("weight_bits") > 1.5  # pyright: ignore
    assert state.factor("weight_bits", reverse=True) < 1, "without a cache a step waits for arithmetic"  # pyright: ignore
    assert "Unpacking adds arithmetic" in widget.figure(state)
    strangers = complete(requests="mixed")
    assert strangers.factor("prefix_caching") == pytest.approx(1), "nobody shares a beginning"
    alone = complete(gpu="H100", slots=1)
    assert alone.factor("paging") == pytest.approx(1, abs=0.01)
    assert alone.factor("continuous_batching") == pytest.approx(1)
    assert state.factor("cuda_graphs") == pytest.approx(1, abs=0.01)
    assert alone.factor("cuda_graphs") > 2  # pyright: ignore


# What is drawn


def test_the_broken_region_begins_between_the_last_that_holds_and_the_first_that_does_not():
    state = complete(level=30)
    ((low, high, trouble),) = breaks(state)
    assert (high, trouble) == (None, "late")
    slots, waits = (np.log(values) for values in _known(state)[:2])
    assert np.interp(math.log(low or 1), slots, waits) == pytest.approx(math.log(30)), "where the drawn line crosses"
    assert breaks(complete(level=200)) == []
    assert breaks(complete(level=10)) == [(None, None, "late")]
    assert breaks(complete(**widget.PRESETS["Does not start"])) == [(None, None, "refused")]
    (low, high, trouble), *more = breaks(complete(**widget.PRESETS["Cache full"]))
    assert (high, trouble, more) == (None, "preempts", [])
    assert low == math.sqrt(16 * 24)


# What can be met, guessed and carried away


@pytest.mark.parametrize(
    ("challenge", "met"),
    [(0, {"tensor_parallel": True, "slots": 64}), (1, {"gpu": "H100", "slots": 1}), (2, {**FIVE, "slots": 32})],
)
def test_each_challenge_can_be_met_but_not_by_a_preset(challenge, met):
    check = widget.CHALLENGES[challenge].check
    assert check(complete(**met)).met
    for preset in widget.PRESETS.values():
        assert not check(complete(**preset)).met


@pytest.mark.parametrize(
    ("challenge", "knobs", "advice"),
    [
        (0, {"gpu": "H100"}, "Use an L4."),
        (0, {"slots": 64}, "Switch on two GPUs: a token waits for a step, and one L4 reads the weights in 19 ms"),
        (0, {"tensor_parallel": True}, "Raise the requests at once"),
        (0, {**ALL_OFF}, "Switch on the KV cache"),
        (1, {"cuda_graphs": False}, "Switch it on: a lever that is off"),
        (1, {"slots": 1}, "Use a faster GPU: on the L4"),
        (2, {}, "Switch off a lever: chunked prefill buys at most ×1.00"),
    ],
)
def test_advice_names_the_knob_that_is_wrong(challenge, knobs, advice):
    progress = widget.CHALLENGES[challenge].check(complete(**knobs))
    assert not progress.met
    assert progress.advice.startswith(advice)


def test_the_guess_is_what_the_sweep_says():
    factor = complete().factor("kv_cache", reverse=True)
    assert factor is not None
    first = complete().factor("kv_cache")
    assert first == pytest.approx(2.26, abs=0.005)
    assert [factor < 1, abs(factor - 2.26) < 1, 4 < factor < 7, factor > 15].index(True) == widget.GUESS.right
