"""Define a widget as plain functions, each of which can be tested without a browser.

sweep(**knobs)               -> state    the real mechanism or model, run for values that the knobs take; plain data
figure(state, width, pinned) -> SVG      where it breaks along one axis, and the mechanism
verdict(state)               -> Verdict  one sentence: what this configuration means
command(state)               -> str      the `vllm serve` line for this configuration
Challenge.check(state)       -> Progress whether the goal is met, and if not, what to change
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any, Literal

from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Group, Knob, Value

Tone = Literal["fine", "tight", "broken"]


@dataclass(frozen=True)
class Verdict:
    """One sentence about what a configuration means; `tone` picks its colour and sign."""

    words: str
    tone: Tone = "fine"


@dataclass(frozen=True)
class Progress:
    """The progress of a challenge: whether it is met, the results that decide it, and advice.

    `advice` says what to change; it is shown until the challenge is met.
    """

    met: bool
    words: str
    advice: str = ""


@dataclass(frozen=True)
class Challenge:
    """A goal to reach with the knobs, and the function that checks it on each state."""

    goal: str
    check: Callable[[Any], Progress]
    lesson: str
    """The lesson of the challenge, in one sentence, shown once the goal is met."""


@dataclass(frozen=True)
class Guess:
    """A question asked first: whatever is drawn inside `drawing.answer()` stays hidden until the
    reader answers.
    """

    question: str
    options: tuple[str, ...]
    right: int
    """The option that is right for the knobs' starting values; a test compares it with the
    sweep.
    """
    because: str
    """The reason, in a sentence or two."""


@dataclass(frozen=True)
class Spec:
    """The definition of a widget, independent of how it is displayed.

    `sweep` may be a generator of more and more complete states, each of which is drawn.
    """

    name: str
    """The name of its package: `kv_cache`."""
    title: str
    lead: str
    """What to try, in one sentence."""
    knobs: Mapping[str, Group]
    """`{"heading": {"argument of sweep": knob}}`."""
    presets: Mapping[str, Mapping[str, Value]]
    """`{"label of a button": {"argument of sweep": value}}`: changes to the starting values that
    break the system.
    """
    sweep: Callable[..., Any]
    figure: Callable[..., str]
    """`figure(state, width=640, pinned=None)`: an SVG of this width; `pinned` is the state to
    compare with.
    """
    verdict: Callable[[Any], Verdict]
    command: Callable[[Any], str]
    challenges: tuple[Challenge, Challenge, Challenge]
    guess: Guess
    starts: Callable[[Any], bool] = lambda _state: True
    """Return whether the system of a state starts; if it does not, one of `mends` may help."""
    mends: tuple[str, ...] = ()
    """Knobs to try, in this order, where the system does not start: the page offers the first turn
    that helps.
    """
    detail: Callable[..., str] | None = None
    """A second picture, called like `figure`, for what would crowd the first."""
    tabs: tuple[str, ...] = ()
    """The names of both pictures, if there are two."""
    own: Mapping[str, str] = field(default_factory=dict)
    """`{"argument of sweep": "what the reader's code does there"}`: `show(schedule=mine)`."""

    def flat(self) -> dict[str, Knob]:
        """Map each argument of `sweep` to its knob."""
        return {name: knob for group in self.knobs.values() for name, knob in group.items()}

    def start(self) -> dict[str, Value]:
        """Return the starting value of each knob."""
        return {name: knob.value for name, knob in self.flat().items()}

    def jumps(self) -> dict[str, dict[str, Value]]:
        """Map each button's label to the values it sets: the first button resets all knobs, the
        others are the presets.
        """
        start = self.start()
        return {"Start again": start} | {label: start | dict(values) for label, values in self.presets.items()}

    def pictures(self, state: Any, width: float, pinned: Any = None) -> str:
        """Draw all pictures of a state, one after the other."""
        draw = (self.figure, self.detail) if self.detail else (self.figure,)
        return "".join(picture(state, width=width, pinned=pinned) for picture in draw)

    def states(self, **values: Any) -> Iterator[Any]:
        """Run the sweep, and yield more and more complete states."""
        swept = self.sweep(**values)
        if isgenerator(swept):
            yield from swept
        else:
            yield swept

    def complete(self, **values: Any) -> Any:
        """Run the sweep to its end, and return the last state."""
        *_, last = self.states(**values)
        return last

    def accept(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Check `values`, and return them in the form that the knobs store.

        Raises:
            MinivllmError: No knob has this name, or it does not take this value.
        """
        knobs = self.flat()
        for name in values:
            require(name in knobs, f"{self.name} has no knob {name!r}; it has {', '.join([*knobs, *self.own])}")
        return {name: knobs[name].accept(value) for name, value in values.items()}


def refused(error: MinivllmError) -> Verdict:
    """Return the verdict for values that the knobs or the sweep refuse."""
    return Verdict(f"This cannot run: {error}", "broken")
