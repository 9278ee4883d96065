"""Test what every widget does with its knobs: draw again, refuse, show errors, compare, save, run
the reader's own code.
"""

import json
from dataclasses import replace

import pytest
from lesson_widgets.sizes import SPEC
from refusals import assert_refused

from minivllm.errors import MinivllmError
from widgets.shell.advice import turn
from widgets.shell.knobs import choice, steps, switch
from widgets.shell.session import LEAST_WIDTH, MOST_WIDTH, Session


def test_a_knob_changes_picture_verdict_and_command():
    session = Session(SPEC)
    view = session.settle(size=5)
    assert "size 5" in view["svg"]
    assert view["words"] == "The size is 5 < 100."
    assert (view["tone"], view["sign"]) == ("fine", "✓")
    assert view["command"].endswith("--size 5")
    assert session.settle(size=5.5)["sign"] == "✕"
    assert session.state.size == 5.5


def test_show_sets_any_knob_and_names_them_where_there_is_no_such():
    values = Session(SPEC, block=16, name="x").values
    assert (values["block"], values["name"]) == (16, "x")
    assert_refused(r"no knob 'width'; it has size, kind, block, name, on, square", Session, SPEC, width=16)
    assert_refused("Block size must be one of 1, 2, 4, 8, 16, not 3", Session, SPEC, block=3)
    assert_refused("Switched on must be True or False, not 1", Session, SPEC, on=1)
    assert_refused("Size must be a number from 0 to 10, not nan", Session, SPEC, size=float("nan"))


def test_a_refusal_is_one_line_and_the_picture_stays_as_it_was():
    session = Session(SPEC)
    drawn = session.settle()["svg"]
    view = session.settle(name="refuse")
    assert view["words"] == "This cannot run: a name is not <b>refuse</b>"
    assert (view["stale"], view["svg"], view["trace"]) == (True, drawn, "")
    assert {challenge["words"] for challenge in view["challenges"]} == {"There is nothing to check."}
    assert session.state is None
    assert session.settle(name="")["stale"] is False


def test_the_readers_own_code_runs_and_its_errors_are_his():
    session = Session(SPEC, square=lambda size: 3 * size)
    session.settle(size=4)
    assert session.state.squared == 12
    assert session.described()["own"] == ["your own square"]
    view = Session(SPEC, square=lambda size: size.nothing).settle()
    assert view["words"].startswith("Your square broke. AttributeError")
    assert_refused("square must be your function or class", Session, SPEC, square=3)


def test_a_sweep_in_steps_is_drawn_at_once_and_at_its_end():
    views = list(Session(SPEC).turn({"size": 3}, between=0))
    assert [view and view["busy"] for view in views] == [True, True, True, False]
    views = list(Session(SPEC).turn({"size": 3}, between=1000))
    assert [view and view["busy"] for view in views] == [True, None, None, False]


def test_the_width_of_the_page_is_the_width_of_the_picture_within_bounds():
    session = Session(SPEC)
    for asked, drawn in ((500, 500), (5000, MOST_WIDTH), (10, LEAST_WIDTH)):
        *_, view = session.turn({}, asked)
        assert f'width="{drawn}"' in view["svg"]


def test_a_pinned_state_is_drawn_behind_and_said():
    session = Session(SPEC, size=6)
    session.settle()
    assert session.pin()["pinned"]["words"] == "The size is 6 < 100."
    view = session.settle(size=3)
    assert 'data-group="pinned"' in view["svg"]
    assert view["pinned"]["values"]["size"] == 6
    assert session.unpin()["pinned"] is None
    assert 'data-group="pinned"' not in session.settle()["svg"]


def test_a_state_is_saved_and_loaded():
    session = Session(SPEC, size=6, kind="square", name="<x>")
    saved = session.settle()["saved"]
    assert Session(SPEC).loaded(saved) == session.values
    for broken in ("", "[]", "{}", '{"widget": "sizes"}', '{"widget": "sizes", "knobs": 3}'):
        assert_refused("this is not a saved state", session.loaded, broken)
    assert_refused("to the widget 'other', not to 'sizes'", session.loaded, '{"widget": "other", "knobs": {}}')
    assert_refused("no knob", session.loaded, '{"widget": "sizes", "knobs": {"x": 1}}')


def test_all_that_a_page_gets_is_json():
    session = Session(SPEC)
    for part in (session.described(), session.settle(), session.pin()):
        assert json.loads(json.dumps(part)) == part


def test_pictures_ahead_are_those_that_the_knob_would_give_the_nearest_first():
    session = Session(SPEC, size=9, name="x")
    before = session.settle()
    views = [view for view in session.ahead() if view]
    sizes = [view["values"]["size"] for view in views]
    assert sorted(sizes) == [index / 2 for index in range(21) if index != 18]
    assert sizes[:3] == [8.5, 9.5, 8]
    assert session.values["size"] == session.state.size == 9
    for view in views[:3]:
        assert Session(SPEC, name="x").settle(size=view["values"]["size"]) == view
    assert session.settle() == before


def test_nothing_is_pinned_or_drawn_ahead_where_nothing_can_be_drawn():
    session = Session(SPEC)
    session.settle(name="refuse")
    assert session.pin()["pinned"] is None
    assert list(session.ahead()) == []


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("error", [SystemExit(3), Unsayable(), ValueError("y" * 10**6), ValueError("\ud800")])
def test_whatever_the_readers_code_raises_is_a_view_that_can_be_sent(error):
    def square(_size):
        raise error

    view = Session(SPEC, square=square).settle()
    assert view["words"].startswith("Your square broke. ")
    assert len(json.dumps(view, ensure_ascii=False).encode()) < 100_000


def test_an_interrupt_is_said_and_goes_on_to_who_asked():
    def square(_size):
        raise KeyboardInterrupt

    views = Session(SPEC, square=square).turn({})
    view = next(views)
    assert view is not None
    assert view["words"].startswith("Interrupted")
    with pytest.raises(KeyboardInterrupt):
        next(views)


def test_a_bug_elsewhere_on_the_axis_does_not_end_the_pictures_ahead():
    session = Session(SPEC, square=lambda size: 1 / (size != 5) and size * size)
    session.settle(size=4)
    assert {view["values"]["size"] for view in session.ahead() if view} >= {0, 4.5, 5.5, 10}


def test_a_turn_that_a_newer_one_has_overtaken_changes_nothing():
    session = Session(SPEC, size=1)
    older = session.turn({"size": 3}, between=0)
    next(older)
    newest = session.settle(size=8)
    assert list(older) == []
    assert session.settle() == newest
    assert session.state.size == 8


def test_half_a_character_is_no_line_of_text():
    assert "is not valid text" in Session(SPEC).settle(name="\ud800")["words"]


def test_what_is_only_shown_differently_is_not_swept_again():
    runs = []
    session = Session(SPEC, square=lambda size: runs.append(size) or size)
    session.settle(size=4)
    swept = len(runs)
    *_, view = session.turn({"size": 4}, 500)
    assert view["svg"] == session.picture
    assert 'width="500"' in view["svg"]
    assert 'data-group="pinned"' in session.pin()["svg"]
    assert len(runs) == swept
    session.settle(size=3)
    assert len(runs) == 2 * swept


def test_the_first_button_resets_and_the_others_start_from_there():
    first, second = Session(SPEC).described()["presets"]
    assert first == {"label": "Start again", "values": SPEC.start()}
    assert second == {"label": "Break it", "values": SPEC.start() | {"size": 9}}


def test_a_guess_is_asked_only_about_the_knobs_that_it_is_about():
    assert Session(SPEC).described()["guess"]["options"] == ["2", "5", "6"]
    assert Session(SPEC, size=3).described()["guess"] is None
    session = Session(SPEC)
    session.settle(size=3)
    assert session.described()["guess"], "it is about the first view"


def test_a_refusal_offers_the_nearest_turn_that_mends_it():
    spec = replace(SPEC, starts=lambda state: state.size <= 3, mends=("size",))
    view = Session(spec).settle(size=4)
    assert view["mend"] == {"label": "Lower the size to 3 (now 4).", "values": {"size": 3.0}}
    assert Session(spec).settle(size=3)["mend"] is None
    assert Session(replace(spec, mends=("block",))).settle(size=4)["mend"] is None, "no turn helps"


def test_a_failure_of_the_readers_own_code_is_no_refusal_of_a_setting():
    def never(size: float) -> float:
        raise MinivllmError("your square returns nothing")

    assert Session(replace(SPEC, mends=("size",)), square=never).settle()["mend"] is None


@pytest.mark.parametrize(
    ("knob", "now", "goal", "words"),
    [
        (steps("Slot rank", [16, 32], 16), 16, 32, "Raise the slot rank to 32 (now 16)."),
        (steps("GPUs (TP)", [1, 2], 2), 2, 1, "Lower GPUs (TP) to 1 (now 2)."),
        (choice("Prefill", [("in chunks", 0), ("whole", 1)], 1), 1, 0, 'Set "Prefill" to "in chunks".'),
        (switch("Grouped heads", False), False, True, "Switch on the grouped heads."),
    ],
)  # fmt: skip
def test_a_turn_of_a_knob_is_said_like_all_advice(knob, now, goal, words):
    assert turn(knob, now, goal) == words
