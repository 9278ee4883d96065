"""Measure the widgets' latency as a reader sees it: from a key press to the next picture, and
redraws per second while dragging.

    uv run python benchmarks/widget_latency.py                    # every widget, in JupyterLab in a headless Chromium
    uv run python benchmarks/widget_latency.py --only kv_cache
    uv run python benchmarks/widget_latency.py --site out/site    # in the site that `make site` has built

Each widget is shown in a notebook of its own by its `show()`, or on its lesson's page, where the
column "starts" has the seconds from opening the page to the live widget. Arrow keys change every
slider and list; a press is timed from the browser's time stamp of the key to the frame after the first new
picture. Then the pointer drags the handle through the plot and back within 0.8 s, so that the
number of its values sets no limit. A control page, whose picture needs no sweep, shows what the
machine and the browser cost by themselves. The table is followed by one line of JSON.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Page, sync_playwright

import widgets
from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import record_table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser test's own way to open a notebook
from e2e.browser import Lab, start_browser  # noqa: E402
from e2e.chromium import HOW_TO_GET_IT, find_chromium  # noqa: E402
from e2e.jupyter import jupyterlab  # noqa: E402
from e2e.static_server import served  # noqa: E402

WIDGETS = widgets.names()
CONTROL = """\
from widgets.shell.knobs import slider
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.shell.plot import Axes, Scale
from widgets.shell.svg import Box, Drawing

def picture(size, width, pinned):
    drawing = Drawing(width, 300, f"size {size}")
    Axes(drawing, Box(40, 40, width - 80, 200), Scale(0, 50), Scale(0, 1)).here(size, "size", f"{size:g}")
    return drawing.render()

LessonWidget(Spec(
    name="control", title="t", lead="l", knobs={"Knobs": {"size": slider("size", 0, 50, 1, 0)}}, presets={},
    sweep=lambda size: size, figure=picture, verdict=lambda size: Verdict("v"), command=str,
    challenges=(Challenge("g", lambda size: Progress(False, "w"), "l"),) * 3, guess=Guess("q", ("a", "b"), 0, "b"),
))
"""
WATCH = """(widget) => {
  window.seen = { key: 0, shown: 0, pictures: 0 };
  document.addEventListener("keydown", (event) => (window.seen.key = event.timeStamp), true);
  new MutationObserver(() => {
    window.seen.pictures += 1;
    if (window.seen.shown < window.seen.key) requestAnimationFrame(() => (window.seen.shown = performance.now()));
  }).observe(document.querySelector(`${widget} .lw-picture`), { childList: true });
}"""
SETTLED = "(widget) => !document.querySelector(`${widget} .lw-busy`)"
SETTLES = 180_000
"""Milliseconds in which a sweep ends, on a busy machine too."""
TIMED_OUT = 1.0
"""Seconds after which a press is said to have changed no picture."""


def pressed(page: Page, key: str) -> float | None:
    """Return the milliseconds from this key to the frame with the new picture, or None if the
    control or the picture stays the same.
    """
    before, stood = page.evaluate("[window.seen.pictures, document.activeElement.value]")
    page.keyboard.press(key)
    if page.evaluate("document.activeElement.value") == stood:  # at its end
        return None
    deadline = time.monotonic() + TIMED_OUT
    while time.monotonic() < deadline:
        seen = page.evaluate("window.seen")
        if seen["pictures"] > before and seen["shown"] > seen["key"]:
            return seen["shown"] - seen["key"]
        page.wait_for_timeout(5)
    return None


def presses(page: Page, widget: str, times: int) -> list[float]:
    """Press each arrow key `times` times on every slider and list of the widget with this selector;
    return the milliseconds of each press.
    """
    latencies: list[float] = []
    controls = page.locator(f"{widget} .lw-controls").locator("input[type=range], select")
    for control in controls.all():
        control.focus()
        for key in ["ArrowRight"] * times + ["ArrowLeft"] * times:
            milliseconds = pressed(page, key)
            if milliseconds is not None:
                latencies.append(milliseconds)
            page.wait_for_function(SETTLED, arg=widget, timeout=SETTLES)
    return latencies


def dragged(page: Page, widget: str, seconds: float = 0.8) -> float:
    """Return new pictures per second while the pointer moves through the plot."""
    handle = page.locator(f"{widget} [data-drag] rect").first
    handle.scroll_into_view_if_needed()
    area = handle.bounding_box()
    assert area, "the widget has no handle"
    middle = area["y"] + area["height"] / 2
    page.mouse.move(area["x"] + 2, middle)
    page.mouse.down()
    before, start = page.evaluate("window.seen.pictures"), time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        share = 1 - abs(1 - passed / seconds * 2)  # there and back
        page.mouse.move(area["x"] + share * area["width"], middle)
        page.wait_for_timeout(8)
    redraws = page.evaluate("window.seen.pictures") - before
    page.mouse.up()
    return redraws / passed


def measured(page: Page, widget: str, times: int) -> dict[str, float]:
    """Return the figures of one widget, in milliseconds and in pictures per second."""
    page.wait_for_selector(f"{widget} .lw-picture svg")
    page.wait_for_function(SETTLED, arg=widget, timeout=SETTLES)
    page.evaluate(WATCH, widget)
    keys = presses(page, widget, times)
    return {
        "median": statistics.median(keys),
        "p90": statistics.quantiles(keys, n=10)[-1],
        "presses": len(keys),
        "drag": dragged(page, widget),
    }


def in_notebook(browser: Browser, server: str, path: str, times: int) -> dict[str, float]:
    """Measure the widget of one notebook."""
    with closing(Lab(browser, server)) as lab, lab.opened(path) as notebook:
        notebook.run_all()
        if problems := notebook.problems():
            raise MinivllmError("; ".join(problems))
        return measured(notebook.page, ".lw", times)


def on_page(browser: Browser, address: str, name: str, times: int) -> dict[str, float]:
    """Open a lesson's page at its widget and measure it, with the seconds until it is live."""
    widget = f".lesson-widget[data-widget={name}]"
    with closing(browser.new_context()) as context:
        page = context.new_page()
        began = time.monotonic()
        page.goto(f"{address}#{name}?")
        page.wait_for_selector(f"{widget}[data-live]", timeout=SETTLES)
        starts = time.monotonic() - began
        knobs = page.locator(f"{widget} .lw-controls").locator("input, select")
        enabled = sum(knob.is_enabled() for knob in knobs.all())
        return {"starts": starts, "knobs": enabled} | measured(page, widget, times)


def on_pages(names: list[str], times: int, site: Path) -> dict[str, dict[str, float]]:
    """Measure each widget on its lesson's page.

    Raises:
        MinivllmError: the site does not show one of the widgets live.
    """
    pages = {}
    for page in sorted(site.glob("lessons/*.html")):
        pages |= dict.fromkeys(re.findall(r'data-widget="(\w+)"', page.read_text()), page.name)
    if missing := set(names) - set(pages):
        raise MinivllmError(f"{site} has no live {', '.join(sorted(missing))}: run make site, with npm installed")
    with sync_playwright() as playwright, served(site) as address:
        browser = start_browser(playwright, chromium())
        return {
            name: on_page(browser, f"{address}/lessons/{pages[name]}", name, times) for name in track(names, "widgets")
        }


def chromium() -> str:
    """Return Chromium's path.

    Raises:
        MinivllmError: this machine has none.
    """
    path = find_chromium()
    if not path:
        raise MinivllmError(f"no Chromium on this machine: {HOW_TO_GET_IT}")
    return path


def in_notebooks(names: list[str], times: int) -> dict[str, dict[str, float]]:
    """Measure the control page and each widget in JupyterLab."""
    cells = {"control": CONTROL} | {name: f"from widgets import {name}\n\n{name}.show()" for name in names}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "notebooks"
        folder.mkdir()
        for name, source in cells.items():
            cell = nbformat.v4.new_code_cell(source, id="widget")
            kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
            nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), folder / f"{name}.ipynb")
        browser = start_browser(playwright, chromium())
        with jupyterlab(folder, Path(place) / "jupyter") as server:
            return {
                name: in_notebook(browser, server, f"{name}.ipynb", times) for name in track(list(cells), "widgets")
            }


def main(arguments: argparse.Namespace) -> None:
    """Measure, print the table and one line of JSON."""
    names = arguments.only or WIDGETS
    if arguments.site:
        figures = on_pages(names, arguments.times, Path(arguments.site))
    else:
        figures = in_notebooks(names, arguments.times)
    columns = "median, ms {median:.0f} | p90, ms {p90:.0f} | presses {presses} | redraws/s {drag:.0f}"
    if arguments.site:
        columns = f"starts, s {{starts:.1f}} | knobs {{knobs}} | {columns}"
    title = "From a key press to the picture, and pictures per second while dragging"
    record_table(title, figures, f"widget {{name}} | {columns}")
    report(record("widgets", figures), arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--only", choices=WIDGETS, action="append", help="measure only this widget (may be repeated)")
    flags.add_argument("--site", metavar="FOLDER", help="measure the pages of this built site, not notebooks")
    flags.add_argument("--times", type=positive_int, default=3, help="presses of each control in each direction")
    return flags


if __name__ == "__main__":
    run(main, parser())
