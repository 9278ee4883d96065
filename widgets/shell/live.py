"""Carry out a page's messages in order, and draw ahead while no knob moves.

A notebook's kernel (`lesson_widget`) and the site's worker (`page`) share this. It imports neither,
so that the worker needs none of a notebook's packages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from minivllm.errors import MinivllmError
from widgets.shell.session import Session
from widgets.shell.spec import Spec

REST = 0.3
"""Seconds between the last turn of a knob and drawing ahead."""
Views = Iterator[dict[str, Any] | None]


class Live:
    """A widget that a page can turn.

    Args:
        spec: The widget.
        settings: Knobs that differ from their starting values, and the reader's code for the parts
            in `spec.own`.

    Raises:
        MinivllmError: No knob has this name, or it does not take this value.
    """

    view: dict[str, Any]
    """The last view that was posted to the page."""

    def __init__(self, spec: Spec, **settings: Any) -> None:
        self.session = Session(spec, **settings)
        self._pending: Views = iter(())  # what is still to be drawn; a newer turn replaces it
        self._serial = 0

    @property
    def state(self) -> Any:
        """Return the sweep's state for the knobs' values, or None if they were refused."""
        return self.session.state

    def set(self, **values: Any) -> None:
        """Set knobs, run the whole sweep, and draw."""
        self.rest()
        self.post(self.session.settle(**values))

    def rest(self) -> None:
        """Draw nothing more until the next message."""
        self._pending = iter(())

    def post(self, view: Mapping[str, Any]) -> None:
        """Show a view on the page."""
        self.view = {**view, "serial": self._serial}

    def post_ahead(self, view: Mapping[str, Any]) -> None:
        """Give the page a view to keep for another value of the swept knob."""
        raise NotImplementedError

    def heard(self, message: Any) -> None:
        """Handle a message from the page, and ignore any of another shape."""
        match message:
            case {"do": "pin"}:
                self.post(self.session.pin())
            case {"do": "unpin"}:
                self.post(self.session.unpin())
            case {"do": "rest"}:
                self.rest()
            case {"do": "load", "text": str(text)}:
                self._load(text)
            case {"do": "turn", "values": {**values}, "serial": int(serial)}:
                self._serial = serial
                self.turn(values, message.get("width"))

    def _load(self, text: str) -> None:
        try:
            values = self.session.loaded(text)
        except MinivllmError as error:
            self.post({**self.view, "words": f"Not loaded: {error}.", "tone": "broken", "sign": "✕"})
            return
        self.turn(values, None)

    def turn(self, values: Mapping[str, Any], width: float | None) -> None:
        """Draw the first picture at once, and the rest of the sweep between the page's messages."""
        self._pending = self.session.turn(values, width)
        self._continue(self._pending)

    def _continue(self, pending: Views) -> None:
        if pending is not self._pending:  # knobs were turned meanwhile
            return
        try:
            view = next(pending)
        except KeyboardInterrupt:  # the view reports it; raised here, it would end the kernel's loop
            return
        except StopIteration:
            self._pending = self.session.ahead()
            asyncio.get_running_loop().call_later(REST, self._draw_ahead, self._pending)
            return
        if view and pending is self._pending:
            self.post(view)
        asyncio.get_running_loop().call_later(0, self._continue, pending)

    def _draw_ahead(self, pending: Views) -> None:
        """Draw the pictures along the swept axis while no knob moves, so that dragging does not
        need Python.
        """
        if pending is not self._pending:
            return
        try:
            view = next(pending)
        except (StopIteration, KeyboardInterrupt):
            return
        if view is not None:
            self.post_ahead(view)
        asyncio.get_running_loop().call_later(0, self._draw_ahead, pending)
