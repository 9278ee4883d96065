"""What a widget is made of: plain functions, each of which can be tested without a browser.

sweep(**knobs)               -> state    the real mechanism or model, run for these knobs; plain data
figure(state, width, pinned) -> SVG      where it breaks along one axis, and the mechanism
verdict(state)               -> Verdict  one line: what this configuration means
command(state)               -> str      the `vllm serve` line that the configuration means
Challenge.check(state)       -> Progress is the goal met, and if not, which knob is wrong and why
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any, Literal

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Group, Knob, Value

Tone = Literal["fine", "tight", "broken"]


@dataclass(frozen=True)
class Verdict:
    """One line on what a configuration means; `tone` picks its colour and sign."""

    words: str
    tone: Tone = "fine"


@dataclass(frozen=True)
class Progress:
    """Progress of a challenge: whether it is met, the figures that decide it, and advice.

    `advice` names the knob that is wrong and why; it is shown while the challenge is not met.
    """

    met: bool
    words: str
    advice: str = ""


@dataclass(frozen=True)
class Challenge:
    """Something to find with the knobs: a goal, and its live check on the state of a sweep."""

    goal: str
    check: Callable[[Any], Progress]
    lesson: str
    """What meeting the goal shows: one sentence, said once it is met."""


@dataclass(frozen=True)
class Guess:
    """A question before the answer is drawn: what stands in `drawing.answer()` is hidden until one is picked."""

    question: str
    options: tuple[str, ...]
    right: int
    """Which of `options` is right for the knobs as they are at the start; a test holds it against the sweep."""
    because: str
    """Why, in a sentence."""


@dataclass(frozen=True)
class Spec:
    """A widget, without any way to show it.

    `sweep` may be a generator: each state that it yields is more complete than the one before, and each is drawn.
    """

    name: str
    """Its module: `kv_cache`."""
    title: str
    lead: str
    """One sentence on what to try."""
    knobs: Mapping[str, Group]
    """`{"heading": {"argument of sweep": knob}}`."""
    presets: Mapping[str, Mapping[str, Value]]
    """`{"label of a button": {"argument of sweep": value}}`: what to change from the start to see where it breaks."""
    sweep: Callable[..., Any]
    figure: Callable[..., str]
    """`figure(state, width=640, pinned=None)`: SVG of this width; `pinned` is the state to compare with."""
    verdict: Callable[[Any], Verdict]
    command: Callable[[Any], str]
    challenges: tuple[Challenge, Challenge, Challenge]
    guess: Guess
    own: Mapping[str, str] = field(default_factory=dict)
    """`{"argument of sweep": "what the reader's own code does there"}`: `show(schedule=mine)`."""

    def flat(self) -> dict[str, Knob]:
        """All knobs, by the argument that each sets."""
        return {name: knob for group in self.knobs.values() for name, knob in group.items()}

    def start(self) -> dict[str, Value]:
        """The knobs' values at the start."""
        return {name: knob.value for name, knob in self.flat().items()}

    def jumps(self) -> dict[str, dict[str, Value]]:
        """All knobs' values by the label of a button: the first button resets them, the others are the presets."""
        start = self.start()
        return {"Start again": start} | {label: start | dict(values) for label, values in self.presets.items()}

    def states(self, **values: Any) -> Iterator[Any]:
        """What the sweep gives for these knobs, each state more complete than the one before."""
        swept = self.sweep(**values)
        if isgenerator(swept):
            yield from swept
        else:
            yield swept

    def complete(self, **values: Any) -> Any:
        """The last of `states`."""
        *_, last = self.states(**values)
        return last

    def accept(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """`values` as the knobs hold them.

        Raises:
            MinivllmError: there is no such knob, or it takes no such value.
        """
        knobs = self.flat()
        for name in values:
            require(name in knobs, f"{self.name} has no knob {name!r}; it has {', '.join([*knobs, *self.own])}")
        return {name: knobs[name].accept(value) for name, value in values.items()}


def require_numbers(most: Mapping[str, float], **values: Any) -> None:
    """Rejects values that are not numbers, or above their maximum in `most`, as sweeps would take too long.

    An integer maximum requires an integer value. Each sweep checks its own minimum.

    Raises:
        MinivllmError: a value is not a number, not an integer, or too large.
    """
    for name, value in values.items():
        whole = isinstance(most[name], int)
        fits = is_number(value) and (isinstance(value, int) or not whole) and value <= most[name]
        require(fits, f"{name} must be a {'whole ' * whole}number of at most {most[name]:,}, not {value!r}")


def refused(error: MinivllmError) -> Verdict:
    """What is said where the knobs ask for something that cannot be."""
    return Verdict(f"This cannot be: {error}", "broken")
