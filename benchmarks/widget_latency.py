"""Measure the widgets' latency as a reader sees it: from a key press to the next picture, and
redraws per second while dragging.

    uv run python benchmarks/widget_latency.py                    # every widget, in JupyterLab in a headless Chromium
    uv run python benchmarks/widget_latency.py --only kv_cache

Each widget is shown in a notebook of its own by its `show()`. Arrow keys change every slider and
list; a press is timed from the browser's time stamp of the key to the frame after the first new
picture. Then the pointer drags the handle through the plot and back within 0.8 s, so that the
number of its values sets no limit. A control page, whose picture needs no sweep, shows what the
machine and the browser cost by themselves. The table is followed by one line of JSON.
"""

import argparse
import json
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
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.progress import track
from minivllm_lab.results import record, write_json
from minivllm_lab.tables import table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser test's own way to open a notebook
from e2e.browser import Lab, Notebook, start_browser  # noqa: E402
from e2e.chromium import HOW_TO_GET_IT, find_chromium  # noqa: E402
from e2e.jupyter import jupyterlab  # noqa: E402

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
WATCH = """() => {
  window.seen = { key: 0, shown: 0, pictures: 0 };
  document.addEventListener("keydown", (event) => (window.seen.key = event.timeStamp), true);
  new MutationObserver(() => {
    window.seen.pictures += 1;
    if (window.seen.shown < window.seen.key) requestAnimationFrame(() => (window.seen.shown = performance.now()));
  }).observe(document.querySelector(".lw-picture"), { childList: true });
}"""
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


def presses(notebook: Notebook, times: int) -> list[float]:
    """Press each arrow key `times` times on every slider and list; return the milliseconds of each
    press.
    """
    found: list[float] = []
    for control in notebook.page.locator(".lw-controls input[type=range], .lw-controls select").all():
        control.focus()
        for key in ["ArrowRight"] * times + ["ArrowLeft"] * times:
            milliseconds = pressed(notebook.page, key)
            if milliseconds is not None:
                found.append(milliseconds)
            notebook.page.wait_for_function("() => !document.querySelector('.lw-busy')", timeout=60_000)
    return found


def dragged(page: Page, seconds: float = 0.8) -> float:
    """Return new pictures per second while the pointer moves through the plot."""
    area = page.locator("[data-drag] rect").first.bounding_box()
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


def measured(browser: Browser, server: str, path: str, times: int) -> dict[str, float]:
    """Return the figures of one widget, in milliseconds and in pictures per second."""
    with closing(Lab(browser, server)) as lab, lab.opened(path) as notebook:
        notebook.run_all()
        if problems := notebook.problems():
            raise MinivllmError("; ".join(problems))
        notebook.page.wait_for_selector(".lw-picture svg")
        notebook.page.wait_for_function("() => !document.querySelector('.lw-busy')", timeout=60_000)
        notebook.page.evaluate(WATCH)
        keys = presses(notebook, times)
        deciles = statistics.quantiles(keys, n=10)
        return {
            "median": statistics.median(keys),
            "p90": deciles[-1],
            "presses": len(keys),
            "drag": dragged(notebook.page),
        }


def all_widgets(names: list[str], times: int) -> dict[str, dict[str, float]]:
    """Measure the control page and each widget."""
    chromium = find_chromium()
    if not chromium:
        raise MinivllmError(f"no Chromium on this machine: {HOW_TO_GET_IT}")
    cells = {"control": CONTROL} | {name: f"from widgets import {name}\n\n{name}.show()" for name in names}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "notebooks"
        folder.mkdir()
        for name, source in cells.items():
            cell = nbformat.v4.new_code_cell(source, id="widget")
            kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
            nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), folder / f"{name}.ipynb")
        browser = start_browser(playwright, chromium)
        with jupyterlab(folder, Path(place) / "jupyter") as server:
            return {name: measured(browser, server, f"{name}.ipynb", times) for name in track(list(cells), "widgets")}


def main(arguments: argparse.Namespace) -> None:
    """Measure, print the table and one line of JSON."""
    figures = all_widgets(arguments.only or WIDGETS, arguments.times)
    rows = [
        (name, f"{one['median']:.0f}", f"{one['p90']:.0f}", int(one["presses"]), f"{one['drag']:.0f}")
        for name, one in figures.items()
    ]
    columns = ("widget", "median, ms", "p90, ms", "presses", "redraws/s")
    table("From a key press to the picture, and pictures per second while dragging", columns, rows)
    if arguments.json:
        write_json(arguments.json, "widgets", figures)
    print(json.dumps(record("widgets", figures)))


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", choices=WIDGETS, action="append", help="measure only this widget (may be repeated)")
    flags.add_argument("--times", type=positive_int, default=3, help="presses of each control in each direction")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
