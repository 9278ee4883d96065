"""What a reader can turn: choices, steps, sliders, switches and lines of text, as data.

A knob says which values it takes and what each is called in words; the shell draws the control. Values are what JSON
can carry, so a state can be stored, sent and loaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.config.checks import encodable, is_number, require

Value = bool | int | float | str
Kind = Literal["choice", "steps", "slider", "entry", "switch"]


@dataclass(frozen=True)
class Knob:
    """One control: its label, its value at the start, and the values that it takes."""

    kind: Kind
    label: str
    value: Value
    tip: str = ""
    options: tuple[tuple[str, Value], ...] = ()
    """Of a choice and of steps: each value with its name."""
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    unit: str = ""
    """Of a slider: written after its figure."""
    placeholder: str = ""

    def __post_init__(self) -> None:
        self.accept(self.value)

    def accept(self, value: Any) -> Value:
        """`value`, as this knob holds it.

        Raises:
            MinivllmError: the knob cannot stand there.
        """
        if self.kind == "entry":
            require(isinstance(value, str), f"{self.label} is a line of text, not {value!r}")
            encodable(value, self.label)
        elif self.kind == "switch":
            require(isinstance(value, bool), f"{self.label} is True or False, not {value!r}")
        elif self.kind == "slider":
            inside = is_number(value) and self.low - 1e-9 <= value <= self.high + 1e-9
            require(inside, f"{self.label} is a number from {self.low:g} to {self.high:g}, not {value!r}")
        else:
            same = [own for _, own in self.options if own == value and isinstance(own, bool) == isinstance(value, bool)]
            named = ", ".join(repr(own) for _, own in self.options)
            require(bool(same), f"{self.label} is one of {named}, not {value!r}")
            return same[0]
        return value

    def words(self, value: Value) -> str:
        """The name of `value`: what the control shows and a screen reader says."""
        if self.kind == "slider":
            return f"{value:g}{self.unit}"
        return next((name for name, own in self.options if own == value), str(value))

    def places(self) -> list[Any]:
        """All values of a slider, of steps or of a choice, in order."""
        if self.kind == "slider":
            count = round((self.high - self.low) / self.step)
            return [round(self.low + index * self.step, 10) for index in range(count + 1)]
        return [value for _, value in self.options]

    def described(self) -> dict[str, Any]:
        """All that a page needs to draw the control."""
        options = [{"name": name, "value": value} for name, value in self.options]
        range_ = {"low": self.low, "high": self.high, "step": self.step, "unit": self.unit}
        return {
            "kind": self.kind,
            "label": self.label,
            "tip": self.tip,
            "options": options,
            "placeholder": self.placeholder,
            **range_,
        }


def choice(label: str, options: Sequence[Any], value: Value, tip: str = "") -> Knob:
    """One of a few values, or of (name, value) pairs, from a list that folds down."""
    return Knob("choice", label, value, tip, options=_named(options))


def steps(label: str, options: Sequence[Any], value: Value, tip: str = "") -> Knob:
    """A slider over given values, or (name, value) pairs: what doublings need."""
    return Knob("steps", label, value, tip, options=_named(options))


def slider(label: str, low: float, high: float, step: float, value: float, tip: str = "", unit: str = "") -> Knob:
    """A slider over a range."""
    return Knob("slider", label, value, tip, low=low, high=high, step=step, unit=unit)


def entry(label: str, value: str = "", placeholder: str = "", tip: str = "") -> Knob:
    """A line to type into; taken over on Enter, or when the focus leaves."""
    return Knob("entry", label, value, tip, placeholder=placeholder)


def switch(label: str, value: bool, tip: str = "") -> Knob:
    """A box to tick."""
    return Knob("switch", label, value, tip)


def _named(options: Sequence[Any]) -> tuple[tuple[str, Value], ...]:
    return tuple(option if isinstance(option, tuple) else (str(option), option) for option in options)


Group = Mapping[str, Knob]
"""Knobs by the argument of `sweep` that each sets."""
