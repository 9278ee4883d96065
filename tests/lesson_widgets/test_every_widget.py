"""Test every widget: it shows where it breaks, everything is readable, no knob is dead, and it is
drawn immediately.

Times are CPU times, so that they hold on a busy machine.
"""

import importlib
import json
import math
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest
from pace import quiet_seconds
from pictures import differences
from refusals import assert_refused

import widgets
from widgets.__main__ import FIGURES, IN_LESSONS, LESSON_WIDTH, main
from widgets.disaggregation.state import experiment as disaggregation_experiment
from widgets.serving.runs import experiment as serving_experiment
from widgets.shell.knobs import Knob
from widgets.shell.session import Session
from widgets.shell.spec import Spec
from widgets.shell.theme import COLOURS

NAMES = widgets.names()
LESSONS = Path(__file__).resolve().parents[2] / "lessons"
WIDTHS = (360, 640, 1200)
MOST_HEIGHT = 470
"""Of a picture that stands beside its controls, so that both are seen at once on a screen of
1366 × 768.
"""
LEAST_TEXT = 11.9
MOST_BYTES = 100_000
NONSENSE = (None, math.nan, "nonsense", 10**9, -(10**9))

every_widget = pytest.mark.parametrize("name", NAMES)


def spec_of(name: str) -> Spec:
    return importlib.import_module(f"widgets.{name}").SPEC


@cache
def sessions_of(name: str) -> list[Session]:
    """Sweep to the end from a widget's start and from its first preset, and from its other presets
    until there is a picture, once for all tests.
    """
    for shows_all_its_runs in (disaggregation_experiment, serving_experiment):  # those of earlier tests too
        shows_all_its_runs.cache_clear()
    spec = spec_of(name)
    sessions = [Session(spec) for _ in range(1 + len(spec.presets))]
    for index, (session, values) in enumerate(zip(sessions, [{}, *spec.presets.values()], strict=True)):
        if index < 2:
            session.settle(**values)
        else:
            next(session.turn(values))
    return sessions


@cache
def views_of(name: str, width: int = 640) -> list[dict]:
    """Draw each session at this width."""
    return [next(session.turn({}, width)) for session in sessions_of(name)]


def start_view(name: str) -> dict:
    return views_of(name)[0]


def pictures_of(view: dict) -> list[ET.Element]:
    """Return a view's pictures, one for each tab."""
    return list(ET.fromstring(f"<div>{view['svg']}</div>"))


def first_picture(spec: Spec, values: dict) -> str:
    """Return the picture drawn before anything new has been swept."""
    view = next(Session(spec).turn(values, between=math.inf))
    assert view
    return view["svg"]


def other_values(knob: Knob) -> list:
    if knob.kind == "switch":
        return [not knob.value]
    if knob.kind == "entry":
        return []
    return [value for value in knob.places() if value != knob.value]


def test_every_lesson_shows_one_and_its_picture():
    lessons = {path: path.read_text() for path in LESSONS.glob("[0-9]*.md")}
    shown = set(re.findall(r"^(\w+)\.show\(\)", "".join(lessons.values()), re.MULTILINE))
    assert set(NAMES) == set(IN_LESSONS) == shown
    for picture in IN_LESSONS.values():
        (text,) = (text for path, text in lessons.items() if path.name.startswith(f"{picture[:2]}_"))
        assert f"(figures/{picture})" in text


@pytest.mark.parametrize(("name", "picture"), IN_LESSONS.items())
def test_the_picture_in_the_lesson_is_the_widgets(name: str, picture: str):
    drawn = spec_of(name).figure(sessions_of(name)[0].state, width=LESSON_WIDTH)
    shown = (FIGURES / picture).read_text()
    assert not differences(drawn, shown), f"uv run python -P -m widgets {name}"


def test_the_program_draws_that_picture(tmp_path: Path):
    main(["kv_cache", str(tmp_path / "here.svg")])
    drawn = spec_of("kv_cache").figure(sessions_of("kv_cache")[0].state, width=LESSON_WIDTH)
    assert (tmp_path / "here.svg").read_text() == drawn


@every_widget
def test_the_first_view_has_a_hidden_answer_tips_and_handles_on_their_axes_and_some_view_a_break(name: str):
    spec = spec_of(name)
    marks = [mark for picture in pictures_of(start_view(name)) for mark in picture.iter()]
    assert {"data-answer", "data-tip"} <= {key for mark in marks for key in mark.keys()}  # noqa: SIM118 (no mapping)
    handles = [mark for mark in marks if mark.get("data-drag")]
    assert handles
    for handle in handles:
        knob = spec.flat()[handle.get("data-drag", "")]
        low, high = float(handle.get("data-low", "nan")), float(handle.get("data-high", "nan"))
        assert low - 1e-9 <= min(knob.places()) <= knob.value <= max(knob.places()) <= high + 1e-9
    assert any("data-broken" in view["svg"] for view in views_of(name))
    assert "broken" in {view["tone"] for view in views_of(name)}


@every_widget
@pytest.mark.parametrize("width", WIDTHS)
def test_all_that_is_drawn_can_be_read(name: str, width: int):
    for view in views_of(name, width):
        assert not view["stale"], view["words"]
        assert len(view["svg"]) < MOST_BYTES
        assert not re.search(r'="[^"]*\bnan\b', view["svg"])
        assert not re.search(r"\de[+-]\d", view["svg"] + view["words"]), "no number is written with an exponent"
        roots = pictures_of(view)
        assert {float(root.get("width", "0")) for root in roots} == {width}
        assert width < 600 or max(float(root.get("height", "0")) for root in roots) <= MOST_HEIGHT
        marks = [mark for root in roots for mark in root.iter()]
        sizes = [float(mark.get("font-size", "13")) for mark in marks if mark.tag.endswith(("text", "tspan"))]
        assert min(sizes) >= LEAST_TEXT
        colours = {mark.get(key) for mark in marks for key in ("fill", "stroke")} - {None, "none", "transparent"}
        assert colours <= COLOURS


@every_widget
def test_the_first_view_is_broken(name: str):
    assert start_view(name)["tone"] == "broken", start_view(name)["words"]


@every_widget
def test_where_the_system_does_not_start_one_turn_mends_it(name: str):
    spec = spec_of(name)
    refused = [view for view in views_of(name) if view["mend"]]
    for view in refused:
        assert view["tone"] == "broken"
        assert view["mend"]["label"].endswith(".")
        (knob,) = view["mend"]["values"]
        assert knob in spec.mends
        assert next(Session(spec).turn(view["values"] | view["mend"]["values"], between=math.inf))["mend"] is None
    assert set(spec.mends) <= set(spec.flat())


@every_widget
def test_no_knob_is_dead(name: str):
    spec = spec_of(name)
    start = first_picture(spec, {})
    for knob_name, knob in spec.flat().items():
        values = [{knob_name: value} for value in other_values(knob)]
        at_once = any(first_picture(spec, value) != start for value in values)
        if values and not at_once:  # only its sweep shows what it does
            assert any(Session(spec).settle(**value)["svg"] != start_view(name)["svg"] for value in values), knob_name


@every_widget
def test_challenges_begin_unmet_and_say_what_is_wrong(name: str):
    for challenge in start_view(name)["challenges"]:
        assert not challenge["met"]
        assert challenge["words"]
        assert challenge["advice"]


@every_widget
def test_a_state_means_a_command_and_goes_round_as_json(name: str):
    for session, view in zip(sessions_of(name), views_of(name), strict=True):
        assert re.search(r"^(# .*\n)*vllm (serve|bench) ", view["command"]), view["command"]
        assert Session(spec_of(name)).loaded(view["saved"]) == session.values
        assert json.loads(json.dumps(view)) == view


@every_widget
def test_what_no_knob_can_say_is_refused_in_one_line(name: str):
    spec = spec_of(name)
    for argument, knob in spec.flat().items():
        for value in NONSENSE:
            if isinstance(value, str) and knob.kind == "entry":
                continue
            assert_refused(re.escape(knob.label), Session, spec, **{argument: value})


@every_widget
def test_a_move_is_drawn_at_once(name: str):
    spec = spec_of(name)
    session, seconds = Session(spec), []
    session.settle()
    for knob_name, knob in spec.flat().items():
        for value in other_values(knob)[:1]:
            moved = session.turn({knob_name: value})
            seconds.append(quiet_seconds(lambda moved=moved: next(moved)))
            next(moved, None)  # so that the next move finds a run under way
        session.settle(**spec.start())
    assert statistics.median(seconds) < 0.05


IMPORTS = f"""
import importlib, json, sys, time
from widgets.shell.session import Session
for name in {NAMES}:
    start = time.process_time()
    widget = importlib.import_module("widgets." + name)
    seconds = time.process_time() - start
    next(Session(widget.SPEC).turn({{}}))
    heavy = {{"torch", "triton", "transformers", "matplotlib", "numpy"}} & set(sys.modules)
    print(json.dumps([name, seconds, sorted(heavy)]))
"""


def test_importing_needs_no_torch_and_little_time():
    run = subprocess.run([sys.executable, "-P", "-c", IMPORTS], capture_output=True, text=True)
    assert run.stderr == ""
    imported = [json.loads(line) for line in run.stdout.splitlines()]
    assert [(name, heavy) for name, _, heavy in imported] == [(name, []) for name in NAMES]
    assert {name: seconds for name, seconds, _ in imported if seconds >= 5} == {}
