"""A widget in the controls that every Jupyter page has: the form for pages on which the shell cannot come to life.

    from widgets.shell.plain import plain
    plain(kv_cache.SPEC)

Controls, picture, verdict and challenges, all redrawn by the kernel; no tooltips, no player, no dragging.
"""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from widgets.shell.knobs import Knob
from widgets.shell.session import Session
from widgets.shell.spec import Spec

LAYOUT = {"width": "330px"}
STYLE = {"description_width": "110px"}


def plain(spec: Spec, **settings: Any) -> ipywidgets.Box:
    """`spec` as a form; `settings` are knobs and parts of the reader's own, as `show` takes them.

    Raises:
        MinivllmError: there is no such knob, or it takes no such value.
    """
    session = Session(spec, **settings)
    controls = {name: _control(knob, session.values[name]) for name, knob in spec.flat().items()}
    picture, says = ipywidgets.HTML(), ipywidgets.HTML()

    def show(view: dict[str, Any]) -> None:
        picture.value = view["svg"]
        goals = zip(spec.challenges, view["challenges"], strict=True)
        tasks = "".join(
            f"<li>{'✓' if one['met'] else '·'} {escape(goal.goal)} <i>{escape(one['words'])} "
            f"{escape('' if one['met'] else one['advice'])}</i></li>"
            for goal, one in goals
        )
        says.value = f"<p><b>{view['sign']}</b> {escape(view['words'])}</p><ol>{tasks}</ol>"

    def moved(_change: object) -> None:
        show(session.settle(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(moved, names="value")
    show(session.settle())
    heading = ipywidgets.HTML(f"<h4>{escape(spec.title)}</h4><p>{escape(spec.lead)}</p>")
    right = ipywidgets.VBox([picture, says])
    return ipywidgets.VBox([heading, ipywidgets.HBox([ipywidgets.VBox([*controls.values()]), right])])


def _control(knob: Knob, value: Any) -> ipywidgets.ValueWidget:
    shared = {"description": knob.label, "value": value, "tooltip": knob.tip, "layout": LAYOUT, "style": STYLE}
    if knob.kind == "choice":
        return ipywidgets.Dropdown(options=list(knob.options), **shared)
    if knob.kind == "steps":
        return ipywidgets.SelectionSlider(options=list(knob.options), **shared)
    if knob.kind == "slider":
        return ipywidgets.FloatSlider(min=knob.low, max=knob.high, step=knob.step, **shared)
    if knob.kind == "switch":
        return ipywidgets.Checkbox(**shared)
    return ipywidgets.Text(continuous_update=False, placeholder=knob.placeholder, **shared)
