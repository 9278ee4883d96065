"""Define the controls that a reader can use, as data: choices, steps, sliders, switches and lines
of text.

A knob knows which values it takes and how each is labelled; the shell draws the control. Values are
JSON, so a state can be saved and loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.config.checks import encodable, is_number, require

Value = bool | int | float | str
Kind = Literal["choice", "steps", "slider", "entry", "switch"]


@dataclass(frozen=True)
class Knob:
    """A control: its label, its starting value, and the values it takes."""

    kind: Kind
    label: str
    value: Value
    tip: str = ""
    options: tuple[tuple[str, Value], ...] = ()
    """Each value of a choice or of steps, with its name."""
    low: float = 0.0
    high: float = 0.0
    step: float = 0.0
    unit: str = ""
    """The unit after a slider's number."""
    placeholder: str = ""

    def __post_init__(self) -> None:
        self.accept(self.value)

    def accept(self, value: Any) -> Value:
        """Check `value`, and return it in the form that the knob stores.

        Raises:
            MinivllmError: The knob does not take this value.
        """
        if self.kind == "entry":
            require(isinstance(value, str), f"{self.label} must be a line of text, not {value!r}")
            encodable(value, self.label)
        elif self.kind == "switch":
            require(isinstance(value, bool), f"{self.label} must be True or False, not {value!r}")
        elif self.kind == "slider":
            inside = is_number(value) and self.low - 1e-9 <= value <= self.high + 1e-9
            require(inside, f"{self.label} must be a number from {self.low:g} to {self.high:g}, not {value!r}")
        else:
            values = self.places()
            equal = [item for item in values if item == value and isinstance(item, bool) == isinstance(value, bool)]
            listed = ", ".join(map(repr, values))
            require(bool(equal), f"{self.label} must be one of {listed}, not {value!r}")
            return equal[0]
        return value

    def words(self, value: Value) -> str:
        """Return the name of `value`, as the control shows it and a screen reader reads it."""
        if self.kind == "slider":
            return f"{value:g}{self.unit}"
        return next((name for name, own in self.options if own == value), str(value))

    def places(self) -> list[Any]:
        """List all values of a slider, of steps or of a choice, in order."""
        if self.kind == "slider":
            count = round((self.high - self.low) / self.step)
            return [round(self.low + index * self.step, 10) for index in range(count + 1)]
        return [value for _, value in self.options]

    def described(self) -> dict[str, Any]:
        """Return everything a page needs to draw the control."""
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
    """Make a drop-down list of values, or of (name, value) pairs."""
    return Knob("choice", label, value, tip, options=_named(options))


def steps(label: str, options: Sequence[Any], value: Value, tip: str = "") -> Knob:
    """Make a slider over listed values, or (name, value) pairs, for scales such as doublings."""
    return Knob("steps", label, value, tip, options=_named(options))


def slider(label: str, low: float, high: float, step: float, value: float, tip: str = "", unit: str = "") -> Knob:
    """Make a slider over a range."""
    return Knob("slider", label, value, tip, low=low, high=high, step=step, unit=unit)


def entry(label: str, value: str = "", placeholder: str = "", tip: str = "") -> Knob:
    """Make a line to type into; it takes effect on Enter, or when it loses focus."""
    return Knob("entry", label, value, tip, placeholder=placeholder)


def switch(label: str, value: bool, tip: str = "") -> Knob:
    """Make a checkbox."""
    return Knob("switch", label, value, tip)


def labelled(values: Iterable[Any], phrase: Callable[[Any], str]) -> list[tuple[str, Any]]:
    """Pair each value with its name, as options for a choice or for steps."""
    return [(phrase(value), value) for value in values]


def _named(options: Sequence[Any]) -> tuple[tuple[str, Value], ...]:
    return tuple(option if isinstance(option, tuple) else (str(option), option) for option in options)


Group = Mapping[str, Knob]
"""Knobs, keyed by the argument of `sweep` that each sets."""
