"""One reader at one widget: where the knobs stand, what is drawn for them, what is pinned, which challenges are met.

Nothing here knows how it is shown: `shell` puts it into a notebook, `plain` is the form without a front end of its
own, and the site is built from the views of many knob settings.
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
from inspect import isgenerator
from typing import Any

from minivllm.config.checks import is_number, require
from minivllm.errors import MinivllmError
from widgets.shell.knobs import Value
from widgets.shell.spec import Progress, Spec, Verdict, refused

SIGNS = {"fine": "✓", "tight": "!", "broken": "✕"}
"""Beside the colour of a tone, for those who cannot go by colour."""
WIDTH = 640
"""Pixels of a picture where nobody has said how wide it may be."""
MOST_WIDTH, LEAST_WIDTH = 760, 360
"""Of a picture on a page; text in it keeps its size."""
NOTHING = Progress(False, "There is nothing to check.")
MOST_SAID, MOST_TRACED = 600, 20_000
"""Characters of a verdict and of a trace: what the reader's code raises or returns can be of any size."""
ONE_AT_A_TIME = threading.RLock()
"""Held during each step of a sweep: runs are shared by all widgets, and JupyterLab's messages come in another thread
than the cells."""


class Session:
    """The state of one widget.

    Args:
        spec: the widget.
        settings: knobs that do not stand as at the start, and the reader's own code for what `spec.own` names.

    Raises:
        MinivllmError: there is no such knob, or it takes no such value.
    """

    def __init__(self, spec: Spec, **settings: Any) -> None:
        self.spec = spec
        given = {name: part for name, part in settings.items() if name in spec.own}
        for name, part in given.items():
            require(callable(part), f"{name} is a function or a class of yours ({spec.own[name]}), not {part!r}")
        self.own = {name: _apart(part) for name, part in given.items()}
        knobs = {name: value for name, value in settings.items() if name not in spec.own}
        self.values: dict[str, Value] = spec.start() | spec.accept(knobs)
        self.width = WIDTH
        self.state: Any = None
        self.picture = ""
        self.pinned: Any = None
        self._pinned_view: dict[str, Any] | None = None
        self._view: dict[str, Any] = {}
        self._turn = object()
        """The newest turn; an older one that is still under way ends."""

    @property
    def swept(self) -> str | None:
        """The knob that the pointer drags in the picture: its axis is the one along which the system breaks."""
        dragged = re.search(r'data-drag="(\w+)"', self.picture)
        return dragged[1] if dragged else None

    def turn(
        self, values: Mapping[str, Any], width: float | None = None, between: float = 0.1
    ) -> Iterator[dict[str, Any] | None]:
        """Turn knobs, and give the view after each step of the sweep; never raises for what the knobs say.

        A view is what a page needs: the picture, the verdict, the challenges; the last one has `busy` False. None
        stands for a step of the sweep that is not drawn, since the last drawing is less than `between` seconds old.
        """
        return _in_turn(self._turned(values, width, between))

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
                yield self._drawn(self.state, busy=False)  # only how it is shown has changed
            else:
                yield from self._views(between)
        except MinivllmError as error:
            yield self._failed(refused(error))
        except KeyboardInterrupt:
            yield self._failed(Verdict("Interrupted. Turn a knob to go on.", "broken"))
            raise
        except (Exception, SystemExit) as error:  # a cell that calls sys.exit() would end the kernel
            named = "".join(traceback.format_exception_only(error)).strip()
            whose = f"Your {' and '.join(self.own)}" if self.own else "The widget"
            trace = "".join(traceback.format_exception(error))
            yield self._failed(Verdict(f"{whose} broke. {named}", "broken"), trace)

    def settle(self, **values: Any) -> dict[str, Any]:
        """Turn knobs, run the sweep to its end, and give the last view."""
        *_, last = self.turn(values, between=math.inf)
        assert last is not None
        return last

    def pin(self) -> dict[str, Any]:
        """Keep this state to compare with; gives the view."""
        if self._view.get("busy"):
            self.settle()
        if self.state is not None:
            self.pinned = self.state
            self._pinned_view = {key: self._view[key] for key in ("words", "tone", "sign", "svg", "values")}
        return self.settle()

    def unpin(self) -> dict[str, Any]:
        """Compare with nothing; gives the view."""
        self.pinned = self._pinned_view = None
        return self.settle()

    def loaded(self, text: str) -> dict[str, Value]:
        """The knobs of a state that a view had as `saved`.

        Raises:
            MinivllmError: it is no state of this widget.
        """
        try:
            state = json.loads(text)
            name, knobs = state["widget"], dict(state["knobs"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            wanted = f'{{"widget": "{self.spec.name}", "knobs": {{…}}}}'
            raise MinivllmError(f"this is no saved state; one reads {wanted}") from error
        require(name == self.spec.name, f"this state is of the widget {name!r}, and this is {self.spec.name!r}")
        return self.spec.accept(knobs)

    def described(self) -> dict[str, Any]:
        """What never changes: texts, knobs, presets, goals."""
        spec = self.spec
        return {
            "name": spec.name,
            "title": spec.title,
            "lead": spec.lead,
            "groups": [
                {"heading": heading, "knobs": [{"name": name, **knob.described()} for name, knob in group.items()]}
                for heading, group in spec.knobs.items()
            ],
            "presets": [{"label": label, "values": values} for label, values in spec.jumps().items()],
            "challenges": [{"goal": one.goal, "lesson": one.lesson} for one in spec.challenges],
            "guess": {
                "question": spec.guess.question,
                "options": list(spec.guess.options),
                "right": spec.guess.right,
                "because": spec.guess.because,
            },
            "own": [f"{name}: your own" for name in self.own],
            "widths": [LEAST_WIDTH, MOST_WIDTH],
        }

    def _views(self, between: float) -> Iterator[dict[str, Any] | None]:
        turn, swept = self._turn, self.spec.sweep(**self.values, **self.own)
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
        return self._said(values, self.spec.verdict(state), progress) | {
            "svg": self.spec.figure(state, width=self.width, pinned=self.pinned),
            "command": self.spec.command(state),
            "busy": False,
            "stale": False,
        }

    def ahead(self) -> Iterator[dict[str, Any] | None]:
        """The views for all other values of the swept knob, the nearest first.

        A page that has them needs nobody while its handle is dragged. None stands for a step of an unfinished sweep.
        """
        return _in_turn(self._ahead())

    def _ahead(self) -> Iterator[dict[str, Any] | None]:
        name, now = self.swept, dict(self.values)
        if self.state is None or name is None:
            return
        places = self.spec.flat()[name].places()
        here = places.index(min(places, key=lambda place: abs(place - now[name])))
        for index in sorted(range(len(places)), key=lambda index: abs(index - here))[1:]:
            values = {**now, name: places[index]}
            with suppress(Exception, SystemExit):  # the reader hears of it once the knob stands there
                complete = None
                for state in self.spec.states(**values, **self.own):
                    complete = state
                    yield None
                yield self._view_of(values, complete)

    def _failed(self, verdict: Verdict, trace: str = "") -> dict[str, Any]:
        """The picture stays, faded: it no longer fits the knobs."""
        self.state = None
        said = self._said(self.values, verdict, [NOTHING] * len(self.spec.challenges))
        self._view = said | {"svg": self.picture, "command": "", "busy": False, "stale": True}
        self._view["trace"] = _sent(trace, MOST_TRACED)
        return self._view

    def _said(self, values: Mapping[str, Value], verdict: Verdict, progress: list[Progress]) -> dict[str, Any]:
        return {
            "words": _sent(verdict.words, MOST_SAID),
            "tone": verdict.tone,
            "sign": SIGNS[verdict.tone],
            "trace": "",
            "values": dict(values),
            "challenges": [{"met": one.met, "words": one.words, "advice": one.advice} for one in progress],
            "saved": json.dumps({"widget": self.spec.name, "knobs": values}),
            "pinned": self._pinned_view,
        }


def _apart(part: Callable[..., Any]) -> Callable[..., Any]:
    """The reader's code as a function of this session: what is kept of its runs is not taken for another's.

    The same function may do something else in the next cell, by what it calls; and not everything that can be called
    can be hashed.
    """
    return lambda *arguments, **named: part(*arguments, **named)


def _in_turn(views: Iterator[Any]) -> Iterator[Any]:
    """`views`, no two of which are made at the same time."""
    while True:
        with ONE_AT_A_TIME:
            try:
                view = next(views)
            except StopIteration:
                return
        yield view


def _sent(text: str, most: int) -> str:
    """`text` as a page can get it: neither endless nor with half a character."""
    short = text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"
    return short.encode(errors="backslashreplace").decode()
