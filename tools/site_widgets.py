"""Draw views of the site's widgets in advance. A page shows them until its Python has started, and
where it cannot start: when the page is opened from disk, for example.

A view is drawn for every value of the swept axis, for the values of further knobs as far as
`MOST_VIEWS` allows, and for the presets. Settings without a view are greyed out on the page.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib import import_module
from typing import Any

import widgets
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Knob, Value
from widgets.shell.session import Session
from widgets.shell.spec import Spec

MOST_VIEWS = 120
MOST_SWEPT = 40
"""Values of the swept axis, where a slider has more."""
MOST_OTHER = 10
"""Values of a further knob: one with more is left out."""
PIECE = re.compile(r"(?=<)")


def specs() -> dict[str, Spec]:
    """Return every widget's specification, by its module."""
    return {name: import_module(f"widgets.{name}").SPEC for name in widgets.names()}


def table(spec: Spec, settings: Mapping[str, Value], most_views: int = MOST_VIEWS) -> dict[str, Any]:
    """Return everything that a page needs to show a widget without a kernel; `tableHost` in
    `shell.js` reads it.

    Returns:
        described: the texts and knobs; a knob that can be turned has only the values for which
            there are views; a challenge that no view meets is `elsewhere`.
        turns: the knobs that can be turned.
        axes: the knobs that differ between views.
        values: all knobs at the start.
        views: one for each setting; its picture is a list of indices into `pieces`.

    Raises:
        MinivllmError: the widget fails with one of the settings.
    """
    session = Session(spec, **settings)
    start = dict(session.values)
    session.settle()
    turned = choose(spec, start, session.swept, most_views)
    wanted = list(dict.fromkeys(tuple(values.items()) for values in settings_of(spec, start, turned, most_views)))
    axes = [name for name in start if len({dict(values)[name] for values in wanted}) > 1]
    pieces: dict[str, int] = {}
    views = []
    for values in map(dict, wanted):
        view = session.settle(**values)
        if view["trace"]:
            raise MinivllmError(f"the widget {spec.name} fails with {values}: {view['words']}")
        indices = [pieces.setdefault(piece, len(pieces)) for piece in PIECE.split(view["svg"]) if piece]
        views.append({**view, "svg": indices})
    described = _described(session, turned)
    for index, challenge in enumerate(described["challenges"]):
        challenge["elsewhere"] = not any(view["challenges"][index]["met"] for view in views)
    return {
        "described": described,
        "turns": [*turned],
        "axes": axes,
        "values": start,
        "views": views,
        "pieces": [*pieces],
    }


def choose(spec: Spec, start: Mapping[str, Value], swept: str | None, most_views: int) -> dict[str, list[Value]]:
    """Return the knobs that can be turned, each with its values: the swept one first, then those
    that still fit, in order.
    """
    knobs = spec.flat()
    chosen, views = {}, 1
    for name in sorted(knobs, key=lambda name: name != swept):
        most = min(MOST_SWEPT, most_views) if name == swept else MOST_OTHER
        values = values_of(knobs[name], start[name], [preset.get(name) for preset in spec.presets.values()], most)
        if 1 < len(values) <= most and views * len(values) <= most_views:
            chosen[name] = values
            views *= len(values)
    return chosen


def values_of(knob: Knob, start: Value, needed: list[Any], most: int) -> list[Value]:
    """Return a knob's values; a slider with more than `most` is thinned evenly, but keeps the start
    and the presets' values.
    """
    if knob.kind == "entry":
        return []
    if knob.kind == "switch":
        return [False, True]
    if knob.kind != "slider":
        return knob.places()
    places = knob.places()
    needed = sorted({start, *(value for value in needed if value is not None)})
    room = max(most - len(needed), 1)
    even = places[:: max(1, -(-len(places) // room))]
    return sorted({float(value) if not float(value).is_integer() else int(value) for value in (*even, *needed)})


def settings_of(
    spec: Spec, start: Mapping[str, Value], turned: Mapping[str, list[Value]], most_views: int
) -> Iterator[dict[str, Value]]:
    """Yield the settings of every view: all combinations of the knobs that can be turned, then the
    presets, each swept if there is room.
    """
    names = [*turned][::-1]  # the swept one last, so that it changes fastest: sweeps keep what it does not change
    grid = [dict(zip(names, values, strict=True)) for values in itertools.product(*(turned[name] for name in names))]
    yield from ({**start, **values} for values in grid)
    room = most_views - len(grid)
    swept = next(iter(turned), None)
    for preset in ({**start, **values} for values in spec.presets.values()):
        if all(preset[name] == start[name] for name in start if name not in turned):
            continue
        yield preset
        if swept and room >= len(turned[swept]):
            room -= len(turned[swept])
            yield from ({**preset, swept: value} for value in turned[swept])


def _described(session: Session, turned: Mapping[str, list[Value]]) -> dict[str, Any]:
    """Return the texts and knobs; a slider that can be turned becomes steps over the values for
    which there are views.
    """
    described, knobs = session.described(), session.spec.flat()
    for group in described["groups"]:
        for knob in group["knobs"]:
            if knob["kind"] == "slider" and knob["name"] in turned:
                own = knobs[knob["name"]]
                options = [{"name": own.words(value), "value": value} for value in turned[knob["name"]]]
                knob.update(kind="steps", options=options)
    return described


def script(name: str, table: Mapping[str, Any]) -> str:
    """Return a table as a script: a page opened from disk may load scripts, but may not fetch data."""
    return f"(window.widgetTables ??= {{}})[{json.dumps(name)}] = {json.dumps(table, ensure_ascii=False)};\n"


def front_end(source: str) -> str:
    """Return the shell's module as a plain script: a page opened from disk may not import
    modules.
    """
    body = re.sub(r"^export default ", "const anywidget = ", source, count=1, flags=re.MULTILINE)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"(() => {{\n{body}\nwindow.lessonWidgets = {{ Shell, tableHost, kernelHost }};\n}})();\n"


def still(table: Mapping[str, Any]) -> str:
    """Return the picture that the widget shows at the start."""
    first = next(view for view in table["views"] if view["values"] == table["values"])
    return "".join(table["pieces"][index] for index in first["svg"])


def note(table: Mapping[str, Any], live: bool) -> str:
    """Return the line below the table that says which knobs work here, and where all of them do.

    Args:
        table: the views.
        live: whether the site has Python to run the widget.
    """
    labels = {knob["name"]: knob["label"] for group in table["described"]["groups"] for knob in group["knobs"]}
    turned = ", ".join(f"<em>{escape(labels[name])}</em>" for name in table["turns"])
    started = ", and here once Python has started, if the page comes from a server" if live else ""
    all_work = f"Every knob works in the notebook{started}."
    return f"These views were drawn in advance, so you can turn only {turned}. {all_work}"
