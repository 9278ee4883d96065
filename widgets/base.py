"""What every widget shares: knobs and a challenge on the left; on the right the picture and one verdict.

A widget hands over plain functions, each of which can be tested without a browser:

    sweep(**knobs) -> state       the real mechanism or model, run for these knobs; plain data
    figure(state)  -> picture     SVG text, or a matplotlib `Figure`
    verdict(state) -> Verdict     one line: what this configuration means
    Challenge.check(state)        is the goal met, and where do we stand

An exception in an ipywidgets callback vanishes without a trace, so `LessonWidget` catches every one: a
`MinivllmError` (input that cannot work) becomes the verdict, anything else is shown with its traceback folded away.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, ORANGE, VERMILLION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["fine", "tight", "broken"]
_TONES = {"fine": (GREEN, "✓"), "tight": (ORANGE, "!"), "broken": (VERMILLION, "✕")}  # a sign too, not colour alone
_PICTURE_COLUMN = {"flex": "1 1 480px", "max_width": "740px", "min_width": "0"}
_KNOB = {"style": {"description_width": "112px"}, "layout": {"width": "318px"}}
_STYLE = """<style>
.lesson-widget { font-family: var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, #222) }
.lesson-widget h4 { margin: 0 0 2px; font-size: 16px; line-height: 1.3 }
.lesson-widget h5 { margin: 6px 0 2px 2px; font-size: 13px; line-height: 1.3 }
.lesson-widget p { margin: 0 0 4px 2px; font-size: 13px; line-height: 1.45; max-width: 72em }
.lesson-widget .says { padding: 7px 12px; border-left: 4px solid; border-radius: 3px;
  background: var(--jp-layout-color2, #f3f3f3); font-size: 13.5px; line-height: 1.45 }
.lesson-widget .says b:first-child { margin-right: .5em }
.lesson-widget .says pre { font-size: 11px; line-height: 1.3; overflow-x: auto }
.lesson-widget svg[role=img] { display: block; max-width: 100%; height: auto }
.lesson-widget .stale { opacity: .3 }
.lesson-widget summary { cursor: pointer; font-size: 13px }
</style>"""


@dataclass(frozen=True)
class Verdict:
    """One line on what a configuration means; `tone` picks its colour and sign."""

    words: str
    tone: Tone = "fine"


@dataclass(frozen=True)
class Progress:
    """Progress of a challenge: whether it is met, and the figures that decide it."""

    met: bool
    words: str


@dataclass(frozen=True)
class Challenge:
    """Something to find with the knobs: a goal, its live check on the state of a sweep, and a folded hint."""

    goal: str
    check: Callable[[Any], Progress]
    hint: str
    lesson: str
    """What meeting the goal shows: one sentence, said once it is met."""


class LessonWidget(ipywidgets.VBox):
    """Knobs, picture, verdict and challenge, redrawn at every move of a knob.

    Args:
        title: what the widget shows, in a few words.
        lead: one or two sentences on what to try.
        knobs: groups of controls, `{"heading": {"argument of sweep": control}}`.
        presets: `{"label of a button": {"argument of sweep": value}}`; the first resets, others show where it breaks.
    """

    def __init__(
        self,
        *,
        title: str,
        lead: str,
        knobs: Mapping[str, Mapping[str, ipywidgets.ValueWidget]],
        presets: Mapping[str, Mapping[str, Any]],
        sweep: Callable[..., Any],
        figure: Callable[[Any], str | Figure],
        verdict: Callable[[Any], Verdict],
        challenge: Challenge,
    ) -> None:
        self.knobs = {name: control for group in knobs.values() for name, control in group.items()}
        self.state: Any = None
        self._sweep, self._figure, self._judge, self._challenge = sweep, figure, verdict, challenge
        self._listening = True
        self._svg = ""
        self.picture = ipywidgets.HTML(layout={"margin": "0"})
        self.verdict = ipywidgets.HTML(layout={"margin": "6px 0 0"})
        self.progress = ipywidgets.HTML(layout={"margin": "2px 0 0"})
        goal = f"<h5>Challenge</h5><p>{escape(challenge.goal)}</p>"
        hint = f"<details><summary>A hint</summary><p>{escape(challenge.hint)}</p></details>"
        left: list[ipywidgets.Widget] = [
            part for name, group in knobs.items() for part in (_heading(name), *group.values())
        ]
        left.append(ipywidgets.HBox([self._button(label, values) for label, values in presets.items()]))
        left += [ipywidgets.HTML(goal, layout={"margin": "12px 0 0"}), self.progress, ipywidgets.HTML(hint)]
        columns = ipywidgets.Box(
            [
                ipywidgets.VBox(left, layout={"width": "328px", "margin": "0 14px 0 0"}),
                ipywidgets.VBox([self.picture, self.verdict], layout=_PICTURE_COLUMN),
            ],
            layout={"display": "flex", "flex_flow": "row wrap"},
        )
        top = ipywidgets.HTML(f"{_STYLE}<h4>{escape(title)}</h4><p>{escape(lead)}</p>")
        super().__init__([top, columns], layout={"padding": "6px 2px"})
        self.add_class("lesson-widget")
        for control in self.knobs.values():
            control.observe(self._moved, names="value")
        self.redraw()

    def values(self) -> dict[str, Any]:
        """The knobs' current values: the arguments of `sweep`."""
        return {name: control.value for name, control in self.knobs.items()}

    def set(self, **values: Any) -> None:
        """Turn several knobs and redraw once."""
        with self._shown():
            self._listening = False
            try:
                for name, value in values.items():
                    self.knobs[name].value = value
            finally:
                self._listening = True
            self.redraw()

    def redraw(self) -> None:
        """Run the sweep for the current knobs and show the result; never raises."""
        with self._shown():
            self.state = None
            state = self._sweep(**self.values())
            svg = as_svg(self._figure(state))
            verdict, progress = self._judge(state), self._challenge.check(state)
            self.state, self._svg, self.picture.value = state, svg, svg
            self.verdict.value = _says(*_TONES[verdict.tone], escape(verdict.words))
            self.progress.value = self._progress_line(progress)

    def _progress_line(self, progress: Progress) -> str:
        if progress.met:
            return _says(GREEN, "✓ Met.", escape(f"{progress.words} {self._challenge.lesson}"))
        return _says(BLUE, "Not yet.", escape(progress.words))

    def _moved(self, _change: object) -> None:
        if self._listening:
            self.redraw()

    def _button(self, label: str, values: Mapping[str, Any]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=label, layout={"width": "auto", "margin": "10px 6px 0 0"})
        button.on_click(lambda _button: self.set(**values))
        return button

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Say on the verdict line what went wrong inside, and fade the picture, which no longer fits the knobs."""
        try:
            yield
            return
        except MinivllmError as error:
            said = _says(VERMILLION, "✕ This cannot be.", escape(str(error)))
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            line = f"{escape(type(error).__name__)}: {escape(str(error))}"
            said = _says(
                VERMILLION,
                "✕ The widget broke.",
                f'<span class="lesson-widget-error">{line}</span>'
                f"<details><summary>Where</summary><pre>{escape(trace)}</pre></details>",
            )
        self.verdict.value = said
        self.progress.value = _says(BLUE, "Not yet.", "There is nothing to check.")
        self.picture.value = f'<div class="stale">{self._svg}</div>'

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any] | None:
        """The live view, and beside it the picture as it stands, for places where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is not None and self._svg:
            bundle["image/svg+xml"] = self._svg
        return bundle


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


def choice(label: str, options: Sequence[Any], value: Any, tip: str = "") -> ipywidgets.Dropdown:
    """A knob that picks one of a few: values, or (label, value) pairs."""
    return ipywidgets.Dropdown(description=label, options=list(options), value=value, tooltip=tip, **_KNOB)


def steps(label: str, options: Sequence[Any], value: Any, tip: str = "") -> ipywidgets.SelectionSlider:
    """A slider over given values, or (label, value) pairs: what doublings need."""
    return ipywidgets.SelectionSlider(description=label, options=list(options), value=value, tooltip=tip, **_KNOB)


def slider(
    label: str, low: float, high: float, step: float, value: float, tip: str = "", form: str = ".2f"
) -> ipywidgets.FloatSlider:
    """A slider over a range; its figure can be typed too."""
    return ipywidgets.FloatSlider(
        description=label, min=low, max=high, step=step, value=value, readout_format=form, tooltip=tip, **_KNOB
    )


def entry(label: str, value: str = "", placeholder: str = "", tip: str = "") -> ipywidgets.Text:
    """A line to type into; taken over on Enter or when the focus leaves."""
    return ipywidgets.Text(
        description=label, value=value, placeholder=placeholder, tooltip=tip, continuous_update=False, **_KNOB
    )


def as_svg(picture: str | Figure) -> str:
    """SVG text as it is; a matplotlib `Figure` as SVG whose words stay words, to be searched and spoken."""
    if isinstance(picture, str):
        return picture
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lesson"}):
        picture.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _heading(words: str) -> ipywidgets.HTML:
    return ipywidgets.HTML(f"<h5>{escape(words)}</h5>")


def _says(colour: str, sign: str, markup: str) -> str:
    return f'<div class="says" role="status" style="border-color:{colour}"><b>{sign}</b> {markup}</div>'
