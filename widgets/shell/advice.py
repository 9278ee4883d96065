"""Phrase every challenge's advice the same way: what to do, and by how much."""

from __future__ import annotations

from collections.abc import Callable

from widgets.shell.knobs import Knob, Value
from widgets.shell.spec import Progress

Rule = tuple[bool, str]
"""Whether a rule is broken, and what to do about it."""


def _plain(value: float) -> str:
    return f"{value:,g}"


def at_least(knob: str, now: float, goal: float, phrase: Callable[[float], str] = _plain) -> Rule:
    """Require `goal` or more: "Raise the pool to 32K (now 24K)."."""
    return now < goal, f"Raise {knob} to {phrase(goal)} (now {phrase(now)})."


def at_most(knob: str, now: float, goal: float, phrase: Callable[[float], str] = _plain) -> Rule:
    """Require `goal` or less: "Lower the rank to 64 (now 128)."."""
    return now > goal, f"Lower {knob} to {phrase(goal)} (now {phrase(now)})."


def use(knob: str, used: bool) -> Rule:
    """Require a specific model, GPU or the like: "Use an H100."."""
    return not used, f"Use {knob}."


def choose(option: str, label: str, chosen: bool) -> Rule:
    """Require an option of the knob with this label: 'Set "Admitted if" to "all of it fits".'."""
    return not chosen, f'Set "{label}" to "{option}".'


def progress(words: str, *rules: Rule) -> Progress:
    """Return the progress of a challenge, with the advice for the first broken rule; it is met if
    no rule is broken.
    """
    advice = next((advice for broken, advice in rules if broken), "")
    return Progress(not advice, words, advice)


def turn(knob: Knob, now: Value, goal: Value) -> str:
    """Phrase one turn of a knob: "Raise the slot rank to 128 (now 64)."."""
    plain = knob.label[1:2].islower() and "_" not in knob.label
    label = f"the {knob.label[0].lower()}{knob.label[1:]}" if plain else knob.label
    if knob.kind == "switch":
        return f"Switch {'on' if goal else 'off'} {label}."
    if knob.kind == "choice":
        return choose(knob.words(goal), knob.label, chosen=False)[1]
    raised = knob.places().index(goal) > knob.places().index(now)
    return f"{'Raise' if raised else 'Lower'} {label} to {knob.words(goal)} (now {knob.words(now)})."
