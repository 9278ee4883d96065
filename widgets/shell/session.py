"""Keep the state of one reader's widget: knobs, picture, pinned state and challenges.

A session does not know how it is displayed: `lesson_widget` puts it into a notebook, and the site
is built from the views of many knob settings.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from inspect import isgenerator
from typing import Any

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Value
from widgets.shell.mend import mend
from widgets.shell.spec import Progress, Spec, Verdict, refused

SIGNS = {"fine": "✓", "tight": "!", "broken": "✕"}
"""The sign of each tone, for readers who cannot see its colour."""
WIDTH = 640
"""The width of a picture in pixels until a page reports its own."""
MOST_WIDTH, LEAST_WIDTH = 1200, 360
"""Limits of a picture's width; its text keeps its size."""
NOTHING = Progress(False, "There is nothing to check.")
MOST_VERDICT, MOST_TRACE = 600, 20_000
"""The most characters of a verdict and of a trace: the reader's code can raise text of any
length.
"""
ONE_AT_A_TIME = threading.RLock()
"""Held during each step of a sweep: all widgets share their runs, and JupyterLab delivers messages
in another thread than it runs cells.
"""


class Session:
    """The state of one widget.

    Args:
        spec: The widget.
        settings: Knobs that differ from their starting values, and the reader's code for the parts
            in `spec.own`.

    Raises:
        MinivllmError: No knob has this name, or it does not take this value.
    """

    def __init__(self, spec: Spec, **settings: Any) -> None:
        self.spec = spec
        parts = {name: part for name, part in settings.items() if name in spec.own}
        for name, part in parts.items():
            role = spec.own[name]
            require(callable(part), f"{name} must be your function or class ({role}), not {part!r}")
        self.own = {name: _uncached(part) for name, part in parts.items()}
        knobs = {name: value for name, value in settings.items() if name not in spec.own}
        self.values: dict[str, Value] = spec.start() | spec.accept(knobs)
        self._asks = self.values == spec.start()
        self.width = WIDTH
        self.state: Any = None
        self.picture = ""
        self.pinned: Any = None
        self._pinned_view: dict[str, Any] | None = None
        self._view: dict[str, Any] = {}
        self._turn = object()
        """The newest turn; an older turn that is still running stops."""

    @property
    def swept(self) -> str | None:
        """Return the name of the knob that the pointer drags in the picture, or None."""
        dragged = re.search(r'data-drag="(\w+)"', self.picture)
        return dragged[1] if dragged else None

    def turn(
        self, values: Mapping[str, Any], width: float | None = None, between: float = 0.1
    ) -> Iterator[dict[str, Any] | None]:
        """Set knobs, and yield a view after each step of the sweep; bad values become a verdict,
        not an exception.

        A view holds what a page needs: picture, verdict and challenges; in the last view, `busy` is
        False. A step that comes less than `between` seconds after the last drawing is not drawn and
        yields None.
        """
        return _exclusive(self._turned(values, width, between))

    def _turned(
        self, values: Mapping[str, Any], width: float | None, between: float
    ) -> Iterator[dict[str, Any] | None]:
        self._turn = object()
        if is_number(width) and width:
            self.width = round(min(max(width, LEAST_WIDTH), MOST_WIDTH))
        try:
            before, accepted = dict(self.values), self.spec.accept(values)
            self.values |= accepted
            if self.values == before and self.state is not None and not self._view["busy"]:
                yield self._drawn(self.state, busy=False)  # only the width has changed
            else:
                yield from self._views(between)
        except MinivllmError as error:
            yield self._failed(refused(error)) | {"mend": mend(self.spec, self.values)}
        except KeyboardInterrupt:
            yield self._failed(Verdict("Interrupted. Turn a knob to go on.", "broken"))
            raise
        except (Exception, SystemExit) as error:  # a cell that calls sys.exit() would end the kernel
            message = "".join(traceback.format_exception_only(error)).strip()
            source = f"Your {' and '.join(self.own)}" if self.own else "The widget"
            trace = "".join(traceback.format_exception(error))
            yield self._failed(Verdict(f"{source} broke. {message}", "broken"), trace)

    def settle(self, **values: Any) -> dict[str, Any]:
        """Set knobs, run the sweep to its end, and return the last view."""
        *_, last = self.turn(values, between=math.inf)
        assert last is not None
        return last

    def pin(self) -> dict[str, Any]:
        """Pin this state for comparison, and return the view."""
        if self._view.get("busy"):
            self.settle()
        if self.state is not None:
            self.pinned = self.state
            self._pinned_view = {key: self._view[key] for key in ("words", "tone", "sign", "svg", "values")}
        return self.settle()

    def unpin(self) -> dict[str, Any]:
        """Remove the pinned state, and return the view."""
        self.pinned = self._pinned_view = None
        return self.settle()

    def loaded(self, text: str) -> dict[str, Value]:
        """Return the knobs in a state that was saved from a view's `saved` text.

        Raises:
            MinivllmError: The text is not a state of this widget.
        """
        try:
            state = json.loads(text)
            name, knobs = state["widget"], dict(state["knobs"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            form = f'{{"widget": "{self.spec.name}", "knobs": {{…}}}}'
            raise MinivllmError(f"this is not a saved state; a saved state looks like {form}") from error
        require(name == self.spec.name, f"this state belongs to the widget {name!r}, not to {self.spec.name!r}")
        return self.spec.accept(knobs)

    def described(self) -> dict[str, Any]:
        """Return the parts of a page that never change: text, knobs, presets and goals.

        The guess is left out where the knobs differ from those that it is about.
        """
        spec = self.spec
        guess = asdict(spec.guess) | {"options": list(spec.guess.options)}
        return {
            "name": spec.name,
            "title": spec.title,
            "lead": spec.lead,
            "groups": [
                {"heading": heading, "knobs": [{"name": name, **knob.described()} for name, knob in group.items()]}
                for heading, group in spec.knobs.items()
            ],
            "presets": [{"label": label, "values": values} for label, values in spec.jumps().items()],
            "challenges": [{"goal": item.goal, "lesson": item.lesson} for item in spec.challenges],
            "guess": guess if self._asks else None,
            "tabs": list(spec.tabs),
            "own": [f"your own {name}" for name in self.own],
            "widths": [LEAST_WIDTH, MOST_WIDTH],
        }

    def _views(self, between: float) -> Iterator[dict[str, Any] | None]:
        turn = self._turn
        swept = self.spec.sweep(**self.values, **self.own)
        if not isgenerator(swept):
            yield self._drawn(swept, busy=False)
            return
        state, drawn, due = None, None, 0.0
        for state in swept:
            if time.monotonic() < due:
                yield None
            else:
                drawn = state
                yield self._drawn(state, busy=True)
                due = time.monotonic() + between
            if turn is not self._turn:
                return
        if drawn is not state:
            self._drawn(state, busy=False)
        self._view = self._view | {"busy": False}
        yield self._view

    def _drawn(self, state: Any, busy: bool) -> dict[str, Any]:
        self._view = self._view_of(self.values, state) | {"busy": busy}
        self.state, self.picture = state, self._view["svg"]
        return self._view

    def _view_of(self, values: Mapping[str, Value], state: Any) -> dict[str, Any]:
        progress = [challenge.check(state) for challenge in self.spec.challenges]
        return self._texts(values, self.spec.verdict(state), progress) | {
            "svg": self.spec.pictures(state, width=self.width, pinned=self.pinned),
            "command": self.spec.command(state),
            "mend": None if self.spec.starts(state) else mend(self.spec, values),
            "busy": False,
            "stale": False,
        }

    def ahead(self) -> Iterator[dict[str, Any] | None]:
        """Yield the views for all other values of the swept knob, nearest first.

        With these views, a page does not need the kernel while its handle is dragged. A step of an
        unfinished sweep yields None.
        """
        return _exclusive(self._ahead())

    def _ahead(self) -> Iterator[dict[str, Any] | None]:
        name = self.swept
        now = dict(self.values)
        if self.state is None or name is None:
            return
        places = self.spec.flat()[name].places()
        here = places.index(min(places, key=lambda place: abs(place - now[name])))
        for index in sorted(range(len(places)), key=lambda index: abs(index - here))[1:]:
            values = {**now, name: places[index]}
            with suppress(Exception, SystemExit):  # the error is reported once the knob stands there
                complete = None
                for state in self.spec.states(**values, **self.own):
                    complete = state
                    yield None
                yield self._view_of(values, complete)

    def _failed(self, verdict: Verdict, trace: str = "") -> dict[str, Any]:
        """Return a view that reports a failure and keeps the old picture, faded."""
        self.state = None
        texts = self._texts(self.values, verdict, [NOTHING] * len(self.spec.challenges))
        self._view = texts | {"svg": self.picture, "command": "", "busy": False, "stale": True}
        self._view["trace"] = _shortened(trace, MOST_TRACE)
        return self._view

    def _texts(self, values: Mapping[str, Value], verdict: Verdict, progress: list[Progress]) -> dict[str, Any]:
        return {
            "words": _shortened(verdict.words, MOST_VERDICT),
            "tone": verdict.tone,
            "sign": SIGNS[verdict.tone],
            "trace": "",
            "mend": None,
            "values": dict(values),
            "challenges": [{"met": item.met, "words": item.words, "advice": item.advice} for item in progress],
            "saved": json.dumps({"widget": self.spec.name, "knobs": values}),
            "pinned": self._pinned_view,
        }


def _uncached(part: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the reader's code in a new function, so that it never matches cached runs of earlier
    code.

    The same function may behave differently in the next cell because of what it calls, and some
    callables cannot be hashed.
    """
    return lambda *arguments, **named: part(*arguments, **named)


def _exclusive(views: Iterator[Any]) -> Iterator[Any]:
    """Compute each view under the lock, so that no two are computed at the same time."""
    while True:
        with ONE_AT_A_TIME:
            try:
                view = next(views)
            except StopIteration:
                return
        yield view


def _shortened(text: str, most: int) -> str:
    """Shorten a text that is too long for a page, and escape lone surrogates."""
    short = text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
    return short.encode(errors="backslashreplace").decode()
