"""Run a page's widgets in the site's worker: `worker.js` loads this module into Pyodide.

Messages are JSON texts. Each has the `id` of its place on the page, since one worker runs all of a
page's widgets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from minivllm.errors import MinivllmError
from widgets.shell.live import Live
from widgets.shell.spec import Spec


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


class Page:
    """All widgets of a page, by the ids of their places."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.tell = tell
        self.widgets: dict[str, PageWidget] = {}

    def heard(self, text: str) -> None:
        """Start a widget, or hand a message to the one that it is for."""
        message = json.loads(text)
        place = message["id"]
        if message["do"] == "start":
            self._start(place, message)
        else:
            self.widgets[place].heard(message)

    def _start(self, place: str, message: Mapping[str, Any]) -> None:
        """Start a widget, without its settings if they are refused: the page then turns to them,
        and shows why.
        """
        spec = import_module(f"widgets.{message['widget']}").SPEC
        try:
            widget = PageWidget(spec, place, self.tell, **message["settings"])
        except MinivllmError:
            widget = PageWidget(spec, place, self.tell)
        self.widgets[place] = widget
        widget.start(message["width"], message["serial"])
