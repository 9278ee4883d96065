"""Show a widget with Jupyter's standard controls, for pages where the shell cannot run.

    from widgets.shell.plain import plain
    plain(kv_cache.SPEC)

The kernel redraws controls, picture, verdict and challenges; there are no tooltips, no player and
no dragging.
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
    """Show `spec` as a form; `settings` are knobs and the reader's own parts, as `show` takes them.

    Raises:
        MinivllmError: No knob has this name, or it does not take this value.
    """
    session = Session(spec, **settings)
    controls = {name: _control(knob, session.values[name]) for name, knob in spec.flat().items()}
    picture = ipywidgets.HTML()
    verdict = ipywidgets.HTML()

    def show(view: dict[str, Any]) -> None:
        picture.value = view["svg"]
        goals = zip(spec.challenges, view["challenges"], strict=True)
        tasks = "".join(
            f"<li>{'✓' if progress['met'] else '·'} {escape(challenge.goal)} <i>{escape(progress['words'])} "
            f"{escape('' if progress['met'] else progress['advice'])}</i></li>"
            for challenge, progress in goals
        )
        verdict.value = f"<p><b>{view['sign']}</b> {escape(view['words'])}</p><ol>{tasks}</ol>"

    def moved(_change: object) -> None:
        show(session.settle(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(moved, names="value")
    show(session.settle())
    heading = ipywidgets.HTML(f"<h4>{escape(spec.title)}</h4><p>{escape(spec.lead)}</p>")
    right = ipywidgets.VBox([picture, verdict])
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
