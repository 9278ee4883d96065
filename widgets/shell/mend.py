"""Find the one turn of a knob that makes a refused setting run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from minivllm.errors import MinivllmError
from widgets.shell.advice import turn
from widgets.shell.knobs import Value
from widgets.shell.spec import Spec


def mend(spec: Spec, values: Mapping[str, Value]) -> dict[str, Any] | None:
    """Return the first turn of a knob in `spec.mends` with which the system starts, nearest values
    first: its label, and the value to set. Return None if no single turn helps.
    """
    if _runs(spec, values):  # then the reader's own code is what fails
        return None
    for name, value in _turns(spec, values):
        if _runs(spec, {**values, name: value}):
            return {"label": turn(spec.flat()[name], values[name], value), "values": {name: value}}
    return None


def _turns(spec: Spec, values: Mapping[str, Value]) -> Iterator[tuple[str, Value]]:
    for name in spec.mends:
        knob = spec.flat()[name]
        places: list[Any] = [not values[name]] if knob.kind == "switch" else knob.places()
        now = places.index(values[name]) if values[name] in places else 0
        nearest = sorted(range(len(places)), key=lambda index, now=now: abs(index - now))
        yield from ((name, places[index]) for index in nearest if places[index] != values[name])


def _runs(spec: Spec, values: Mapping[str, Value]) -> bool:
    try:
        return spec.starts(next(spec.states(**values)))
    except MinivllmError:
        return False
