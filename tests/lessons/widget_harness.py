"""Tests that every lesson's widget has: of its challenges, its advice and its presets.

Each function returns a test for a lesson's test file:

    test_advice_names_the_knob_that_is_wrong = advice_test(widget, [(0, {"k": 2}, "Raise the drafts")])
"""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import strategies as st
from refusals import assert_refused

from widgets.shell.session import Session
from widgets.shell.spec import Spec

Knobs = dict[str, Any]
SWEEPS = "widgets.shell.swept.PATIENCE"


def first_state(widget: ModuleType, knobs: Knobs) -> Any:
    """Return the state that a sweep begins with, or ends with if it has only one."""
    swept = widget.sweep(**knobs)
    return next(swept) if isinstance(swept, Iterator) else swept


def last_state(widget: ModuleType, **knobs: Any) -> Any:
    """Return the state that a sweep ends with."""
    *_, last = widget.sweep(**knobs)
    return last


def known_state(widget: ModuleType, **knobs: Any) -> Any:
    """Return the first state that knows the result for the reader's own knobs."""
    return next(state for state in widget.sweep(**knobs) if state.known)


def endless(*_: object) -> Any:
    """Stand in for a learner's function that never returns."""
    while True:
        pass


def shaded(widget: ModuleType, state: Any) -> list[str]:
    """Return the words on each region that the figure of this state shades as broken."""
    parts = ET.fromstring(widget.figure(state)).iter()
    return [words for part in parts if (words := part.get("data-broken", ""))]


def served_with(line: str, **flags: object) -> list[str]:
    """Return the words of a `vllm serve` line, which must have these flags."""
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    for name, value in flags.items():
        assert words[words.index(f"--{name.replace('_', '-')}") + 1] == str(value)
    return words


def positions(spec: Spec) -> st.SearchStrategy[Knobs]:
    """Draw a position of each knob that is not typed in."""
    places = {name: knob.places() for name, knob in spec.flat().items() if knob.kind != "entry"}
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in places.items()})


def marks_drawn(spec: Spec, state: Any, width: int = 640, pinned: Any = None) -> list[ET.Element]:
    """Return all marks of a state's pictures, which must have this width and hold no NaN."""
    svg = spec.pictures(state, width, pinned)
    assert not re.search(r"(?<![a-z])(nan|inf)(?![a-z])", svg, re.IGNORECASE)
    pictures = list(ET.fromstring(f"<div>{svg}</div>"))
    assert {float(picture.get("width", 0)) for picture in pictures} == {width}
    return [mark for picture in pictures for mark in picture.iter()]


def verdict_test(widget: ModuleType, here: Callable[..., Any], verdicts: Sequence[tuple]) -> Callable:
    """Test verdicts, each given as knobs, tone and any number of words."""

    @pytest.mark.parametrize("case", verdicts)
    def test(case: tuple) -> None:
        knobs, tone, *words = case
        said = widget.verdict(here(**knobs))
        assert said.tone == tone, said
        assert [each for each in words if each not in said.words] == [], said

    return test


def solution_test(widget: ModuleType, here: Callable[..., Any], solutions: Sequence[Knobs]) -> Callable:
    """Test that each challenge can be met, and by no knob alone unless its solution is that knob."""

    @pytest.mark.parametrize(("index", "solution"), list(enumerate(solutions)))
    def test(index: int, solution: Knobs) -> None:
        check = widget.CHALLENGES[index].check
        assert check(here(**solution)).met
        for name, knob in widget.SPEC.flat().items():
            met = [value for value in knob.places() if check(first_state(widget, {name: value})).met]
            assert not met or solution.keys() == {name}, (name, met)

    return test


def own_code_test(spec: Spec, parts: Sequence[tuple[Any, str]], patience: str = SWEEPS) -> Callable:
    """Test that code of the reader's own that fails or does not return is reported in one line."""
    (argument,) = spec.own

    @pytest.mark.parametrize(("own", "words"), parts)
    def test(own: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patience, 0.2)
        view = Session(spec, **{argument: own}).settle()
        assert view["tone"] == "broken"
        assert words in view["words"]
        assert "\n" not in view["words"]

    return test


def short_runs(runs: ModuleType, counted: int, after: int) -> Callable:
    """Return a fixture that runs few requests, for many settings."""

    @pytest.fixture
    def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        runs.experiment.cache_clear()
        monkeypatch.setattr(runs, "COUNTED", counted)
        monkeypatch.setattr(runs, "AFTER", after)
        yield
        runs.experiment.cache_clear()

    return short


def region_test(widget: ModuleType, values: Sequence[int], settings: Sequence[Knobs]) -> Callable:
    """Test that each value is inside a broken region where it is refused or has a cause, and only there."""

    @pytest.mark.usefixtures("short_runs")
    @pytest.mark.parametrize("knobs", settings, ids=str)
    def test(knobs: Knobs) -> None:
        state = last_state(widget, **knobs)
        assert state.complete
        regions = [*state.stopped, *state.late, *getattr(state, "stalled", ())]
        for value in values:
            inside = any((low or 0) <= value and (high is None or value < high) for low, high in regions)
            assert inside == (value in state.refusals or bool(state.causes(value))), value

    return test


def challenge_test(
    widget: ModuleType,
    here: Callable[..., Any],
    solutions: Sequence[Knobs],
    wrong: Sequence[tuple[int, Knobs]],
    check: Callable[[int, Knobs], Any] | None = None,
) -> Callable:
    """Test that each challenge can be met, and that advice names the knob that is then turned to a
    wrong value.

    `here(**knobs)` returns a state that knows enough for the check; otherwise give the `check`.
    """
    check = check or (lambda index, knobs: widget.CHALLENGES[index].check(here(**knobs)))

    @pytest.mark.parametrize(("index", "knobs"), wrong)
    def test(index: int, knobs: Knobs) -> None:
        solved = check(index, solutions[index])
        assert solved.met, solved
        assert not solved.advice
        missed = check(index, {**solutions[index], **knobs})
        assert not missed.met
        labels = [widget.SPEC.flat()[name].label.lower() for name in knobs]
        assert any(label in missed.advice.lower() for label in labels), missed

    return test


def advice_test(widget: ModuleType, advice: Sequence[tuple[int, Knobs, str]]) -> Callable:
    """Test how the advice of a challenge begins, which needs no run."""

    @pytest.mark.parametrize(("index", "knobs", "words"), advice)
    def test(index: int, knobs: Knobs, words: str) -> None:
        assert widget.CHALLENGES[index].check(first_state(widget, knobs)).advice.startswith(words)

    return test


def preset_test(widget: ModuleType, here: Callable[..., Any], tone: str | None = "broken", **others: str) -> Callable:
    """Test that no preset meets a challenge, and that each has the tone, unless `others` has
    another one for it.
    """

    @pytest.mark.parametrize("preset", widget.SPEC.presets)
    def test(preset: str) -> None:
        state = here(**widget.SPEC.presets[preset])
        assert not any(challenge.check(state).met for challenge in widget.CHALLENGES)
        assert others.get(preset, tone) in (None, widget.verdict(state).tone)

    return test


def unusable_test(here: Callable[..., Any], parts: Sequence[tuple[Knobs, str]], patience: str = SWEEPS) -> Callable:
    """Test that a part of the reader's own that cannot be carried out is refused in words about it."""

    @pytest.mark.parametrize(("own", "about"), parts)
    def test(own: Knobs, about: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if about == "never end":
            monkeypatch.setattr(patience, 0.3)
        assert_refused(about, here, **own)

    return test
