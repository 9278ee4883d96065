"""A small widget for tests of what all widgets share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from minivllm.errors import MinivllmError
from widgets.shell.knobs import choice, entry, slider, steps, switch
from widgets.shell.plot import Axes, Scale, hidden_note
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.shell.svg import Box, Drawing


@dataclass(frozen=True)
class State:
    size: float
    step: int
    squared: float


def sweep(size: float, kind: str, block: int, name: str, on: bool, square: Callable | None = None) -> Iterator[State]:
    if name == "refuse":
        raise MinivllmError("a name is not <b>refuse</b>")
    if name == "bug":
        raise ZeroDivisionError("a bug")
    for step in range(3):
        yield State(size, step, square(size) if square else size**2)


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    drawing = Drawing(width, 300, "Sizes", f"size {state.size:g}")
    axes = Axes(drawing, Box(60, 50, width - 90, 180), Scale(0, 10), Scale(0, 100))
    axes.frame("size", "squared")
    axes.broken(5, None, "too large · a level is missed")
    if pinned:
        axes.pinned([0, pinned.size], [0, pinned.squared], pinned.size)
    with drawing.answer():
        axes.line([0, 5, 10], [0, 25, 100], "#0072B2", tips=["0 of 10", "5 of 10", "10 of 10"], group="curve")
    hidden_note(drawing, axes.box)
    axes.here(state.size, "size", f"{state.size:g}")
    for index in range(4):
        drawing.rect(Box(60 + 40 * index, 270, 30, 20), "#56B4E9", at=f"{index} {index + 1}", tip=f"block {index}")
    drawing.play([f"frame {index}" for index in range(4)])
    return drawing.render()


SPEC = Spec(
    name="sizes",
    title="Sizes <all>",
    lead="Try them.",
    knobs={
        "Sizes": {
            "size": slider("Size", 0, 10, 0.5, 2),
            "kind": choice("Kind", [("a round one", "round"), ("a square one", "square")], "round"),
        },
        "More": {
            "block": steps("Block size", [1, 2, 4, 8, 16], 4),
            "name": entry("Name", "", "a name"),
            "on": switch("Switched on", True),
        },
    },
    presets={"Break it": {"size": 9}},
    sweep=sweep,
    figure=figure,
    verdict=lambda state: Verdict(f"The size is {state.size:g} < 100.", "broken" if state.size > 5 else "fine"),
    command=lambda state: f"vllm serve model --size {state.size:g}",
    challenges=(
        Challenge("Make it 7.", lambda s: Progress(s.size == 7, f"It is {s.size:g}.", "Size is wrong."), "So it was."),
        Challenge("Make it 8.", lambda s: Progress(s.size == 8, f"It is {s.size:g}.", "Size is wrong."), "So it was."),
        Challenge("Make it 9.", lambda s: Progress(s.size == 9, f"It is {s.size:g}.", "Size is wrong."), "So it was."),
    ),
    guess=Guess("Which is too large?", ("2", "5", "6"), 2, "Five still fits."),
    own={"square": "your own square"},
)
