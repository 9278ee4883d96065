"""One notebook in JupyterLab in a headless Chromium: open it, run it, move its sliders by keyboard."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, ViewportSize

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
OPEN_SECONDS = 180
RUN_SECONDS = 240
SETTLE_SECONDS = 20
WINDOW = ViewportSize(width=1500, height=1000)

LIMITED = """async ([work, argument, seconds]) => {
  const late = new Promise((_, fail) =>
    setTimeout(() => fail(new Error(`not done after ${seconds} s`)), seconds * 1000));
  await Promise.race([eval(work)(argument), late]);
}"""
# A panel is ready when its view has as many cells as its model: before that, Run All runs the first ones only.
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
CELLS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
  .filter(cell => cell.cell_type === 'code')
  .map(cell => ({source: cell.getSource(), count: cell.execution_count, outputs: cell.getOutputs()}))"""
# The picture of the widget that an element is part of: what a person sees change.
PICTURE = "element => element.closest('.lw').querySelector('.lw-picture > svg')?.outerHTML"
SLIDER = ".lw input[type=range]:not(.lw-player input)"


@dataclass
class Seen:
    """What a page complained of, and whom it asked."""

    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Note console errors, exceptions of the page and requests that leave the machine."""
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._request)
        page.on("websocket", lambda socket: self._address(socket.url))

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _request(self, request: Request) -> None:
        self._address(request.url)

    def _address(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.elsewhere.append(url)


@dataclass(frozen=True)
class Notebook:
    """A notebook that stands open and ready in a page."""

    page: Page
    seen: Seen

    def run_all(self) -> None:
        """Run every cell and wait for the last. A cell that raises is not noticed here: see `problems`."""
        self.page.evaluate(LIMITED, [RUN_ALL, None, RUN_SECONDS])

    def problems(self) -> list[str]:
        """One line for every code cell that did not run, raised, or shows a widget that broke."""
        found = []
        for number, cell in enumerate(self.page.evaluate(CELLS), start=1):
            name = f"code cell {number} ({cell['source'].splitlines()[0]!r})"
            if not cell["count"]:
                found.append(f"{name} did not run")
            found += [f"{name} raised {out['ename']}: {out['evalue']}" for out in cell["outputs"] if "ename" in out]
        for trace in self.page.locator(".lw-says pre:not(:empty)").all_text_contents():
            found.append(f"a widget broke: {trace.strip().splitlines()[-1]}")
        return found

    def press_arrow(self, slider: int = 0, seconds: float = SETTLE_SECONDS) -> tuple[str | None, str | None]:
        """Move a slider by one key and wait until it says another value and its picture is another one.

        Returns:
            What the slider said before and after.

        Raises:
            TimeoutError: one of the two stayed as it was (playwright's error of that name).
        """
        handle = self.page.locator(SLIDER).nth(slider)
        handle.scroll_into_view_if_needed()
        handle.focus()
        before, picture = handle.get_attribute("aria-valuetext"), handle.evaluate(PICTURE)
        assert picture, "the slider's widget has no picture"
        at_its_end = handle.evaluate("element => element.value === element.max")
        self.page.keyboard.press("ArrowLeft" if at_its_end else "ArrowRight")
        self.page.wait_for_function(
            f"([element, value, picture]) => element.getAttribute('aria-valuetext') !== value "
            f"&& ({PICTURE})(element) !== picture",
            arg=[handle.element_handle(), before, picture],
            timeout=seconds * 1000,
        )
        return before, handle.get_attribute("aria-valuetext")

    def cells(self) -> int:
        """How many cells the notebook has now."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length")

    def screenshot(self, path: Path) -> None:
        """A picture of the first widget with what is around it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.locator(".lw").first.scroll_into_view_if_needed()
        self.page.screenshot(path=path)


def start_browser(playwright: Playwright, executable: str) -> Browser:
    """Debian's Chromium, headless; playwright gives it a fresh profile folder."""
    return playwright.chromium.launch(executable_path=executable, args=FLAGS)


@contextmanager
def opened(browser: Browser, server: str, path: str) -> Iterator[Notebook]:
    """Open the notebook at `path` (from the server's root) and wait until its kernel and all its cells are there."""
    with browser.new_context(viewport=WINDOW) as context:
        page, seen = context.new_page(), Seen()
        seen.watch(page)
        page.goto(f"{server}/doc/tree/{path}?reset")
        page.wait_for_function("() => window.jupyterapp", timeout=OPEN_SECONDS * 1000)
        page.evaluate(LIMITED, [UNTIL_READY, path, OPEN_SECONDS])
        yield Notebook(page, seen)
