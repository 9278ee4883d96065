"""Display every widget through one anywidget, whose front end is `shell.js` and `shell.css`.

The kernel runs the sweep and draws; the page handles controls, tooltips, the player and the
keyboard. Nothing is fetched or built. Without a kernel, the page shows the last picture.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython.display import display

from minivllm.entrypoints.xray.page import theme_script
from widgets.shell.live import Live
from widgets.shell.spec import Spec
from widgets.shell.theme import dark_style

HERE = Path(__file__).parent


def script() -> str:
    """Return the front end, an ES module."""
    return (HERE / "shell.js").read_text() + theme_script()


def style() -> str:
    """Return the front end's CSS, with the colours of pictures on a dark page."""
    return (HERE / "shell.css").read_text() + dark_style(".lw-dark")


class LessonWidget(Live, anywidget.AnyWidget):
    """A lesson's live widget in a notebook: `LessonWidget(SPEC, block_size=64)`, as `Live`."""

    _esm = script()
    _css = style()
    described = traitlets.Dict().tag(sync=True)
    view = traitlets.Dict().tag(sync=True)  # pyright: ignore[reportAssignmentType]

    def __init__(self, spec: Spec, **settings: Any) -> None:
        Live.__init__(self, spec, **settings)
        self._still = f"lw-still-{uuid.uuid4().hex[:8]}"
        described = self.session.described() | {"still": self._still}
        anywidget.AnyWidget.__init__(self, described=described, view=self.session.settle())
        self.on_msg(lambda _widget, message, _buffers: self.heard(message))

    def post_ahead(self, view: Mapping[str, Any]) -> None:
        self.send({"ahead": view, "width": self.session.width})

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
