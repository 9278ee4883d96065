"""One widget on a page of its own, without JupyterLab: the real front end, and the real session
behind it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from e2e.browser import emptied_page, faultless
from playwright.sync_api import Browser, Locator, Page, Route

from minivllm.errors import MinivllmError
from widgets.shell.lesson_widget import script, style
from widgets.shell.session import Session
from widgets.shell.spec import Spec

ADDRESS = "http://127.0.0.1:1/"
"""Nothing listens there: every request is answered by the test."""
GROUNDS = {"light": "#ffffff", "dark": "#111316"}
BODY = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A widget</title>
<style>%(style)s</style></head>
<body style="margin: 8px; background: %(ground)s"><main><h1 hidden>A widget</h1><div id="here"></div></main>
<script type="module">
import { mount } from "./shell.js";
window.ask = async (message) => (await fetch("ask", { method: "POST", body: JSON.stringify(message) })).json();
let view = %(view)s, heard = () => {};
const ask = async (message) => {
  view = { ...(await window.ask(message)), serial: message.serial ?? view.serial };
  heard();
};
window.widget = mount(document.getElementById("here"), {
  described: %(described)s,
  view: () => view,
  turn: (values, width, serial) => ask({ do: "turn", values, width, serial }),
  pin: () => ask({ do: "pin" }),
  unpin: () => ask({ do: "unpin" }),
  load: (text) => ask({ do: "load", text }),
  onView: (callback) => ((heard = callback), () => {}),
  onAhead: (callback) => ((window.ahead = callback), () => {}),
  fixed: () => false,
});
</script></body></html>"""


@dataclass(frozen=True)
class WidgetPage:
    """A widget on a page, and the session that answers it."""

    page: Page
    session: Session

    def control(self, knob: str) -> Locator:
        """Find a knob's control by the argument of the sweep that the knob sets."""
        return self.page.locator(f"[id$='-{knob}']")

    def words(self) -> str:
        """Return the verdict on the page."""
        return self.page.locator(".lw-says span").inner_text()

    def settled(self) -> None:
        """Wait until the page shows what the session has computed for its knobs."""
        self.page.wait_for_function("() => !document.querySelector('.lw-busy')")
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")


@contextmanager
def widget_page(
    browser: Browser, spec: Spec, *, theme="light", width=1366, height=640, whole=True, **settings: Any
) -> Iterator[WidgetPage]:
    """Open `spec` in a window of this size; `settings` are knob values and the reader's own parts.

    Unless `whole`, the page gets only the first view of each sweep.
    """
    session = Session(spec, **settings)

    def turned(values: Mapping[str, Any], width: float | None = None) -> dict[str, Any]:
        views = session.turn(values, width, between=math.inf)
        if not whole:
            return (next(views) or {}) | {"busy": False}
        *_, last = views
        return last or {}

    def ask(message: Mapping[str, Any]) -> dict[str, Any]:
        if message["do"] == "turn":
            return turned(message["values"], message.get("width"))
        if message["do"] == "load":
            try:
                return session.settle(**session.loaded(message["text"]))
            except MinivllmError as error:
                return {**session.settle(), "words": str(error), "tone": "broken", "sign": "✕"}
        return session.pin() if message["do"] == "pin" else session.unpin()

    page = emptied_page(browser, width, height)
    parts = {"view": turned({}) | {"serial": 0}, "described": session.described()}
    body = BODY % {
        "style": style(),
        "ground": GROUNDS[theme],
        **{name: json.dumps(part).replace("</", "<\\/") for name, part in parts.items()},
    }
    page.route(f"{ADDRESS}**", lambda route: _answer(route, body, ask))
    with faultless(page):
        page.goto(ADDRESS)
        page.wait_for_selector(".lw-picture svg")
        opened = WidgetPage(page, session)
        opened.settled()
        yield opened


def _answer(route: Route, body: str, ask: Callable[[Any], dict[str, Any]]) -> None:
    if route.request.method == "POST":
        route.fulfill(json=ask(route.request.post_data_json))
    elif route.request.url.endswith("shell.js"):
        route.fulfill(body=script(), content_type="text/javascript")
    elif route.request.url == ADDRESS:
        route.fulfill(body=body, content_type="text/html")
    else:
        route.fulfill(status=204)
