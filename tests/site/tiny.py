"""A widget of our own, small enough to know by heart: a queue whose wait grows with the load
until it breaks at 1.
"""

from dataclasses import dataclass

from widgets.shell.knobs import choice, entry, slider, switch
from widgets.shell.plot import Axes, Scale
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.shell.svg import Box, Drawing

LOADS = [index / 10 for index in range(1, 16, 2)]


@dataclass(frozen=True)
class State:
    load: float
    servers: int
    loud: bool
    note: str

    @property
    def tone(self) -> str:
        return "broken" if self.load >= self.servers else "fine"


def sweep(load: float, servers: int, loud: bool, note: str) -> State:
    while note == "hang":
        pass
    return State(load, servers, loud, note)


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    drawing = Drawing(width, 240, "The wait of a queue", f"{state.servers} servers")
    drawing.heading((12, 24), "How long one waits" + "!" * state.loud, f"{state.servers} servers")
    axes = Axes(drawing, Box(60, 50, width - 90, 130), Scale(0.1, 1.5), Scale(0, 10))
    axes.broken(state.servers, None, "more work than servers · nobody is ever served")
    axes.frame("load", "wait")
    loads = [load for load in LOADS if load < state.servers]
    waits = [load / (state.servers - load) for load in loads]
    tips = [f"load {load:g}: {wait:.1f}" for load, wait in zip(loads, waits, strict=True)]
    axes.line(loads, waits, "#0072B2", tips=tips)
    axes.here(state.load, "load", f"load {state.load:g}")
    return drawing.render()


def check(state: State) -> Progress:
    return Progress(state.tone == "broken", f"The load is {state.load:g}.", "Raise the load.")


def check_note(state: State) -> Progress:
    return Progress(state.note == "done", f"The note is {state.note!r}.", "Note: write done.")


SPEC = Spec(
    name="tiny",
    title="A queue",
    lead="Raise the load.",
    knobs={
        "Work": {"load": slider("Load", 0.1, 1.5, 0.2, 0.5), "note": entry("Note")},
        "Machine": {"servers": choice("Servers", [1, 2], 1), "loud": switch("Loud", False)},
    },
    presets={"Said": {"load": 1.5, "note": "said"}},
    sweep=sweep,
    figure=figure,
    verdict=lambda state: Verdict(f"At load {state.load:g} this is {state.tone}.", state.tone),
    command=lambda state: f"vllm serve --max-num-seqs {state.servers}",
    challenges=(
        Challenge("Break it.", check, "It breaks at 1."),
        Challenge("Break it twice.", check, "It breaks at 1."),
        Challenge("Write done.", check_note, "No page without a kernel can."),
    ),
    guess=Guess("Where does it break?", ("0.5", "1", "never"), 1, "There is as much work as the server can do."),
)
