"""One notebook in JupyterLab in a headless Chromium: open it, run it, move its sliders by
keyboard.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Playwright, Request, ViewportSize, WebSocket

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
"""No other machine's name is resolved; `watched` notes who asks for one."""
OPEN_SECONDS = 180
RUN_SECONDS = 240
SETTLE_SECONDS = 20
ColorScheme = Literal["light", "dark"]
WINDOW = ViewportSize(width=1500, height=1000)

LIMITED = """async ([work, argument, seconds]) => {
  const late = new Promise((_, fail) =>
    setTimeout(() => fail(new Error(`not done after ${seconds} s`)), seconds * 1000));
  return await Promise.race([eval(work)(argument), late]);
}"""
# A panel is ready when its view has as many cells as its model: before that, Run All runs the first
# ones only.
UNTIL_READY = """async path => {
  const pause = () => new Promise(done => setTimeout(done, 50));
  const app = window.jupyterapp;
  await app.restored;
  while (app.shell.currentWidget?.context?.path !== path) await pause();
  const panel = app.shell.currentWidget;
  await panel.context.ready;
  await panel.revealed;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  while (panel.content.widgets.length < panel.content.model.cells.length) await pause();
}"""
RUN_ALL = "() => window.jupyterapp.commands.execute('notebook:run-all-cells')"
OPEN = "path => window.jupyterapp.commands.execute('docmanager:open', {path}).then(() => null)"
CLOSE = """async () => {
  const panel = window.jupyterapp.shell.currentWidget;
  await panel.sessionContext.shutdown();
  panel.dispose();
}"""
CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
  .filter(cell => cell.cell_type === 'code')
  .map(cell => ({source: cell.getSource(), count: cell.execution_count, outputs: cell.getOutputs()}))"""
# The picture of the widget that an element is part of: what a person sees change.
PICTURE = "element => element.closest('.lw').querySelector('.lw-picture > svg')?.outerHTML"
SLIDER = ".lw input[type=range]:not(.lw-player input)"


@contextmanager
def watched(page: Page) -> Iterator[list[str]]:
    """Yield a list to which, until the end of the block, each error of the page is added, and each address outside
    this machine that it requests.
    """
    complaints: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(f"{message.text} ({message.location.get('url')})")

    def requested(asked: Request | WebSocket) -> None:
        parts = urlsplit(asked.url)
        if parts.scheme not in ("data", "blob", "about", "file") and parts.hostname not in ("127.0.0.1", "localhost"):
            complaints.append(asked.url)

    heard: dict[Any, Callable[[Any], None]] = {
        "console": console,
        "pageerror": lambda error: complaints.append(str(error)),
        "request": requested,
        "websocket": requested,
    }
    for event, note in heard.items():
        page.on(event, note)
    try:
        yield complaints
    finally:
        for event, note in heard.items():
            page.remove_listener(event, note)


@contextmanager
def faultless(page: Page) -> Iterator[list[str]]:
    """Expect a page to have no error, and to request nothing from outside this machine, until the end of the block."""
    with watched(page) as complaints:
        yield complaints
    assert complaints == []


@dataclass(frozen=True)
class Visit:
    """A page that shows what a server has."""

    page: Page
    address: str


@dataclass(frozen=True)
class Notebook:
    """A notebook that is open and ready in a page, and the page's errors and requests elsewhere."""

    page: Page
    complaints: list[str]

    def run_all(self) -> None:
        """Run every cell and wait for the last. `problems` reports the cells that raised; this
        method does not.
        """
        self.page.evaluate(LIMITED, [RUN_ALL, None, RUN_SECONDS])

    def problems(self) -> list[str]:
        """List, in one line each, the code cells that did not run or raised, and the widgets that
        broke.
        """
        results = []
        for number, cell in enumerate(self.page.evaluate(CELLS), start=1):
            name = f"code cell {number} ({cell['source'].splitlines()[0]!r})"
            if not cell["count"]:
                results.append(f"{name} did not run")
            results += [f"{name} raised {out['ename']}: {out['evalue']}" for out in cell["outputs"] if "ename" in out]
        for trace in self.page.locator(".lw-says pre:not(:empty)").all_text_contents():
            results.append(f"a widget broke: {trace.strip().splitlines()[-1]}")
        return results

    def press_arrow(self) -> None:
        """Move the first slider by one key press and wait until its value and its picture have changed.

        Raises:
            TimeoutError: the value or the picture did not change (playwright's error of that name).
        """
        handle = self.page.locator(SLIDER).first
        handle.focus()
        before, picture = handle.get_attribute("aria-valuetext"), handle.evaluate(PICTURE)
        assert picture, "the slider's widget has no picture"
        self.page.keyboard.press("ArrowRight")
        changed = f"([element, value, picture]) => element.ariaValueText !== value && ({PICTURE})(element) !== picture"
        arguments = [handle.element_handle(), before, picture]
        self.page.wait_for_function(changed, arg=arguments, timeout=SETTLE_SECONDS * 1000)

    def cells(self) -> int:
        """Return how many cells the notebook has now."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length")


def start_browser(playwright: Playwright, executable: str) -> Browser:
    """Start headless Chromium; playwright gives it a fresh profile folder."""
    return playwright.chromium.launch(executable_path=executable, args=FLAGS)


_pages: WeakKeyDictionary[Browser, Page] = WeakKeyDictionary()


def emptied_page(browser: Browser, width: int, height: int, color_scheme: ColorScheme = "light") -> Page:
    """Empty the page that this browser's tests share: opening another would take longer than most
    of them.
    """
    page = _pages.get(browser)
    if page is None or page.is_closed():
        _pages[browser] = page = browser.new_context().new_page()
    page.unroute_all()
    page.goto("about:blank")
    page.context.clear_cookies()
    page.mouse.move(0, 0)
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=color_scheme)
    return page


def box_of(element: Locator) -> Any:
    """Return the place of an element, which must be drawn."""
    box = element.bounding_box()
    assert box, f"{element} is not drawn"
    return box


def serious_violations(page: Page, *rules: str) -> list[tuple[str, str]]:
    """Return the serious accessibility violations that axe finds: each rule, and the first element
    that breaks it. Check these rules, or all if there are none.
    """
    from axe_playwright_python.sync_playwright import Axe  # benchmarks use this file without it

    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    violations = Axe().run(page, options=options).response["violations"]
    serious = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
    return [(violation["id"], violation["nodes"][0]["html"][:200]) for violation in serious]


class Lab:
    """A JupyterLab in one page that shows one notebook after another: loading it costs as much as
    running one.
    """

    def __init__(self, browser: Browser, server: str) -> None:
        self.context, self.server = browser.new_context(viewport=WINDOW), server
        self.page: Page | None = None

    @contextmanager
    def opened(self, path: str) -> Iterator[Notebook]:
        """Open the notebook at `path` (from the server's root) and wait until its kernel and all
        its cells are ready.

        Afterwards, shut down its kernel and keep the page for the next notebook; a failed test's
        page is not used again.
        """
        page = self.page or self.context.new_page()
        with watched(page) as complaints:
            if self.page is None:
                page.goto(f"{self.server}/doc/tree/{path}?reset")
                page.wait_for_function("() => window.jupyterapp", timeout=OPEN_SECONDS * 1000)
            else:
                page.evaluate(LIMITED, [OPEN, path, OPEN_SECONDS])
            self.page = None
            page.evaluate(LIMITED, [UNTIL_READY, path, OPEN_SECONDS])
            yield Notebook(page, complaints)
            page.evaluate(LIMITED, [CLOSE, None, OPEN_SECONDS])
        self.page = page

    def close(self) -> None:
        """Close all pages, including those of failed tests."""
        self.context.close()
