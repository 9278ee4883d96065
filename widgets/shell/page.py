"""Run a page's widgets and exercises in the site's worker: `worker.js` loads this module into
Pyodide.

Messages are JSON texts. Each has the `id` of its place on the page, since one worker runs all of a
page's widgets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm_lab.checks.checking import CheckResult, checks_in, module_from, run_check
from widgets.shell.live import Live
from widgets.shell.spec import Spec

EXERCISES = Path(__file__).resolve().parents[2] / "lessons" / "exercises"


class PageWidget(Live):
    """A widget at one place of a page; `tell` sends a text to the page."""

    def __init__(self, spec: Spec, place: str, tell: Callable[[str], object], **settings: Any) -> None:
        super().__init__(spec, **settings)
        self.place = place
        self.tell = tell

    def post(self, view: Mapping[str, Any]) -> None:
        super().post(view)
        self._send(view=self.view)

    def post_ahead(self, view: Mapping[str, Any]) -> None:
        self._send(ahead=view, width=self.session.width)

    def start(self, width: float | None, serial: int) -> None:
        """Describe the widget to the page, and show its first view."""
        self._serial = serial
        self._send(described=self.session.described())
        self.turn({}, width)

    def _send(self, **parts: Any) -> None:
        self.tell(json.dumps({"id": self.place, **parts}))


class PageExercise:
    """An exercise at one place of a page. Each of its checks runs between the page's messages."""

    def __init__(self, place: str, tell: Callable[[str], object]) -> None:
        self.place = place
        self.tell = tell
        self.path = EXERCISES / f"{place}.py"
        self.own: dict[str, Any] = {}
        """The reader's parts for the widget."""
        self._pending: Iterator[CheckResult] = iter(())  # of the newest run
        self._run = 0

    def check(self, source: str, run: int) -> None:
        """Run all checks on the reader's code, and tell each result with the number of the run."""
        self._run = run
        self._pending = self._results(source)
        self._continue(self._pending)

    def take(self, source: str, own: Mapping[str, str]) -> None:
        """Keep the reader's parts for the widget."""
        try:
            module = module_from(source, self.path)
            missing = [name for name in own.values() if not hasattr(module, name)]
            require(not missing, f"there is no {', '.join(missing)} yet")
        except MinivllmError as error:
            self._refuse(error)
            return
        self.own = {argument: getattr(module, name) for argument, name in own.items()}
        self._send(taken=True)

    def _results(self, source: str) -> Iterator[CheckResult]:
        module = module_from(source, self.path)
        yield from (run_check(module, check) for check in checks_in(_checks(self.path.name)))

    def _continue(self, pending: Iterator[CheckResult]) -> None:
        if pending is not self._pending:  # the reader has asked again
            return
        try:
            result = next(pending)
        except StopIteration:
            self._send(checked=True)
        except MinivllmError as error:
            self._refuse(error)
        else:
            self._send(result={"statement": result.statement, "problem": result.problem})
            asyncio.get_running_loop().call_later(0, self._continue, pending)

    def _refuse(self, error: MinivllmError) -> None:
        hint = (
            ". A page has Python alone; `make check` runs what needs more." if "No module named" in str(error) else ""
        )
        self._send(refused=f"{error}{hint}")

    def _send(self, **parts: Any) -> None:
        self.tell(json.dumps({"id": self.place, "run": self._run, **parts}))


@cache
def _checks(name: str) -> ModuleType:
    """Import the checks that need Python alone."""
    path = EXERCISES / "checks" / name
    return module_from(path.read_text(), path)


class Page:
    """All widgets and exercises of a page, by the ids of their places."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.tell = tell
        self.widgets: dict[str, PageWidget] = {}
        self.exercises: dict[str, PageExercise] = {}

    def heard(self, text: str) -> None:
        """Start a widget, or hand a message to the widget or the exercise that it is for."""
        match message := json.loads(text):
            case {"do": "start", "id": place}:
                self._start(place, message)
            case {"do": "check", "id": place, "source": source, "run": run}:
                self._exercise(place).check(source, run)
            case {"do": "take", "id": place, "source": source, "own": own}:
                self._exercise(place).take(source, own)
            case {"id": place}:
                self.widgets[place].heard(message)

    def _exercise(self, place: str) -> PageExercise:
        return self.exercises.setdefault(place, PageExercise(place, self.tell))

    def _start(self, place: str, message: Mapping[str, Any]) -> None:
        """Start a widget, without its settings if they are refused: the page then turns to them,
        and shows why.
        """
        spec = import_module(f"widgets.{message['widget']}").SPEC
        if place in self.widgets:  # as the page shows it with other parts
            self.widgets[place].rest()
        own = self.exercises[message["own"]].own if message.get("own") else {}
        try:
            widget = PageWidget(spec, place, self.tell, **message["settings"], **own)
        except MinivllmError:
            widget = PageWidget(spec, place, self.tell, **own)
        self.widgets[place] = widget
        widget.start(message["width"], message["serial"])
