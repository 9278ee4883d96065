"""Display every widget through one anywidget, whose front end is `shell.js` and `shell.css`.

The kernel runs the sweep and draws; the page handles controls, tooltips, the player and the
keyboard. Nothing is fetched or built. Without a kernel, the page shows the last picture.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython.display import display

from minivllm.entrypoints.xray.page import theme_script
from minivllm.errors import MinivllmError
from widgets.shell.session import Session
from widgets.shell.spec import Spec
from widgets.shell.theme import dark_style

HERE = Path(__file__).parent
REST = 0.3
"""Seconds between the last turn of a knob and drawing ahead."""


def script() -> str:
    """Return the front end, an ES module."""
    return (HERE / "shell.js").read_text() + theme_script()


def style() -> str:
    """Return the front end's CSS, with the colours of pictures on a dark page."""
    return (HERE / "shell.css").read_text() + dark_style(".lw-dark")


class LessonWidget(anywidget.AnyWidget):
    """A lesson's live widget: `LessonWidget(SPEC, block_size=64)`.

    Args:
        spec: The widget.
        settings: Knobs that differ from their starting values, and the reader's code for the parts
            in `spec.own`.

    Raises:
        MinivllmError: No knob has this name, or it does not take this value.
    """

    _esm = script()
    _css = style()
    described = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, spec: Spec, **settings: Any) -> None:
        self.session = Session(spec, **settings)
        self._ahead: Iterator[dict[str, Any] | None] = iter(())  # what is still to be drawn; a newer turn replaces it
        self._serial = 0
        self._still = f"lw-still-{uuid.uuid4().hex[:8]}"
        described = self.session.described() | {"still": self._still}
        super().__init__(described=described, view=self.session.settle())
        self.on_msg(self._heard)

    @property
    def state(self) -> Any:
        """Return the sweep's state for the knobs' values, or None if they were refused."""
        return self.session.state

    def set(self, **values: Any) -> None:
        """Set knobs, run the whole sweep, and draw."""
        self._ahead = iter(())
        self._post(self.session.settle(**values))

    def _heard(self, _widget: object, message: Mapping[str, Any], _buffers: object) -> None:
        """Handle a message from the page (turn, pin, unpin or load), and ignore any other."""
        match message:
            case {"do": "pin"}:
                self._post(self.session.pin())
            case {"do": "unpin"}:
                self._post(self.session.unpin())
            case {"do": "load", "text": str(text)}:
                self._load(text)
            case {"do": "turn", "values": {**values}, "serial": int(serial)}:
                self._serial = serial
                self._turn(values, message.get("width"))

    def _load(self, text: str) -> None:
        try:
            values = self.session.loaded(text)
        except MinivllmError as error:
            self._post({**self.view, "words": f"Not loaded: {error}.", "tone": "broken", "sign": "✕"})
            return
        self._turn(values, None)

    def _turn(self, values: Mapping[str, Any], width: float | None) -> None:
        """Draw the first picture at once, and the rest of the sweep in between the page's messages."""
        self._ahead = self.session.turn(values, width)
        self._go_on(self._ahead)

    def _go_on(self, ahead: Iterator[dict[str, Any] | None]) -> None:
        if ahead is not self._ahead:  # knobs were turned meanwhile
            return
        try:
            view = next(ahead)
        except KeyboardInterrupt:  # the view reports it; raised here, it would end the kernel's loop
            return
        except StopIteration:
            self._ahead = self.session.ahead()
            asyncio.get_running_loop().call_later(REST, self._draw_ahead, self._ahead)
            return
        if view and ahead is self._ahead:
            self._post(view)
        asyncio.get_running_loop().call_later(0, self._go_on, ahead)

    def _draw_ahead(self, ahead: Iterator[dict[str, Any] | None]) -> None:
        """Draw the pictures along the swept axis while no knob moves, so that dragging does not
        need the kernel.
        """
        if ahead is not self._ahead:
            return
        try:
            view = next(ahead)
        except (StopIteration, KeyboardInterrupt):
            return
        if view is not None:
            self.send({"ahead": view, "width": self.session.width})
        asyncio.get_running_loop().call_later(0, self._draw_ahead, ahead)

    def _post(self, view: Mapping[str, Any]) -> None:
        self.view = {**view, "serial": self._serial}

    def still(self) -> str:
        """Return the picture and the verdict as HTML, for pages without a kernel."""
        view = self.view
        return f"<figure>{view['svg']}<figcaption>{view['sign']} {escape(view['words'])}</figcaption></figure>"

    def _ipython_display_(self) -> None:
        """Display the picture, then the live widget, which removes the picture when it starts.

        A page made from an executed notebook shows only one form of each output, and picks the live
        one, which is empty there. That is why the picture is a separate output.
        """
        html = f'<div class="{self._still}">{self.still()}</div>'
        display({"text/html": html, "text/plain": self.view["words"]}, raw=True)
        bundle = super()._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, None)
        display(data, metadata=metadata, raw=True)
