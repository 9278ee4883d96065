"""Measure the widgets' latency as a reader sees it: from a key press to the next picture, and
redraws per second while dragging.

    uv run python benchmarks/widget_latency.py    # in JupyterLab, and on the pages that `make site` has built
    uv run python benchmarks/widget_latency.py --place jupyterlab --only kv_cache

Each widget is shown in a notebook of its own by its `show()`, and on its lesson's page, where the
column "starts" has the seconds from opening the page to the live widget. Arrow keys change every
slider and list; a press is timed from the browser's time stamp of the key to the frame after the first new
picture. Then the pointer drags the handle through the plot and back within 0.8 s, so that the
number of its values sets no limit. A control notebook, whose picture needs no sweep, shows what the
machine and the browser cost by themselves.

What is left of `--minutes` is shared out evenly: where time is short, each control gets fewer
presses, but at least one. The tables are followed by what disturbed the machine, if anything did,
and by one line of JSON.
"""

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Locator, Page, sync_playwright

import widgets
from minivllm.errors import MinivllmError
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.disturbance import Control
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import console, record_table
from minivllm_simulate.virtual_clock import percentile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser test's own way to open a notebook
from e2e.browser import Lab, start_browser  # noqa: E402
from e2e.chromium import HOW_TO_GET_IT, find_chromium  # noqa: E402
from e2e.jupyter import jupyterlab  # noqa: E402
from e2e.static_server import served  # noqa: E402

WIDGETS = widgets.names()
PLACES = ("jupyterlab", "page")
SITE = ROOT / "out" / "site"
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
VALUE = "document.activeElement.value"
HANDLE = """(widget) => {
  const handle = document.querySelector(`${widget} [data-drag] rect`);
  handle.scrollIntoView({ block: "center", behavior: "instant" });
  return handle.getBoundingClientRect().toJSON();
}"""
"""In one call, since a new picture may take the handle's place at any time."""
SETTLES = 180_000
"""Milliseconds in which a sweep ends, on a busy machine too."""
TIMED_OUT = 1.0
"""Seconds after which a press is said to have changed no picture, if the sweep has ended."""
DRAG_SECONDS = 0.8
GOAL = 60
"""Milliseconds that the median of a widget's presses may take."""
COLUMNS = "median, ms {median:.0f} | p90, ms {p90:.0f} | presses {presses} | redraws/s {drag:.0f}"
Figures = dict[str, float]
Measure = Callable[[str, float], Figures]
"""Measures one widget until a time of `time.monotonic`, as far as possible."""


def pressed(page: Page, widget: str, key: str) -> float | None:
    """Return the milliseconds from this key to the frame with the new picture, or None if the
    control or the picture stays the same.
    """
    before, stood = page.evaluate("window.seen.pictures"), page.evaluate(VALUE)
    page.keyboard.press(key)
    if page.evaluate(VALUE) == stood:  # at its end
        return None
    deadline = time.monotonic() + TIMED_OUT
    while time.monotonic() < deadline or not page.evaluate(SETTLED, widget):
        seen = page.evaluate("window.seen")
        if seen["pictures"] > before and seen["shown"] > seen["key"]:
            return seen["shown"] - seen["key"]
        page.wait_for_timeout(5)
    return None


def there_and_back(page: Page, widget: str, times: int, until: float) -> list[float]:
    """Press the right arrow key on the focused control up to `times` times, then the left one until
    the control is back; at its right end, begin to the left. Return the milliseconds of each press.

    Every control thus starts from the widget's own knobs, with which its system starts. The first
    press is made in any case, and no other one away from there in the second half of the time.
    """
    latencies: list[float] = []
    half, start = (time.monotonic() + until) / 2, page.evaluate(VALUE)

    def press(key: str) -> None:
        if (milliseconds := pressed(page, widget, key)) is not None:
            latencies.append(milliseconds)
        page.wait_for_function(SETTLED, arg=widget, timeout=SETTLES)

    for away, back in (("ArrowRight", "ArrowLeft"), ("ArrowLeft", "ArrowRight")):
        for number in range(times):
            if not number or time.monotonic() < half:
                press(away)
        while page.evaluate(VALUE) != start:
            press(back)
        if latencies:
            break
    return latencies


def presses(page: Page, controls: list[Locator], widget: str, times: int, until: float) -> list[float]:
    """Press arrow keys on each control of the widget with this selector; return the milliseconds of
    each press.
    """
    latencies: list[float] = []
    for left, control in zip(range(len(controls), 0, -1), controls, strict=True):
        control.focus()
        now = time.monotonic()
        latencies += there_and_back(page, widget, times, now + (until - now) / left)
    return latencies


def dragged(page: Page, widget: str, seconds: float = DRAG_SECONDS) -> float:
    """Return new pictures per second while the pointer moves through the plot."""
    area = page.evaluate(HANDLE, widget)
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


def measured(page: Page, widget: str, times: int, until: float) -> Figures:
    """Return the figures of one widget, in milliseconds and in pictures per second."""
    page.wait_for_selector(f"{widget} .lw-picture svg")
    page.wait_for_function(SETTLED, arg=widget, timeout=SETTLES)
    page.evaluate(WATCH, widget)
    controls = page.locator(f"{widget} .lw-controls").locator("input[type=range], select").all()
    keys = presses(page, controls, widget, times, until - DRAG_SECONDS)
    if not keys:
        raise MinivllmError(f"no key changed the picture of {widget}")
    return {
        "median": statistics.median(keys),
        "p90": percentile(keys, 0.9),
        "presses": len(keys),
        "drag": dragged(page, widget),
    }


def in_notebook(browser: Browser, server: str, path: str, times: int, until: float) -> Figures:
    """Measure the widget of one notebook."""
    with closing(Lab(browser, server)) as lab, lab.opened(path) as notebook:
        notebook.run_all()
        if problems := notebook.problems():
            raise MinivllmError("; ".join(problems))
        return measured(notebook.page, ".lw", times, until)


def on_page(browser: Browser, address: str, name: str, times: int, until: float) -> Figures:
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
        return {"starts": starts, "knobs": enabled} | measured(page, widget, times, until)


def pages_of(names: list[str], site: Path) -> dict[str, str]:
    """Return the page of each widget in a built site.

    Raises:
        MinivllmError: the site does not show one of the widgets live.
    """
    pages = {}
    for page in sorted(site.glob("lessons/*.html")):
        pages |= dict.fromkeys(re.findall(r'data-widget="(\w+)"', page.read_text()), page.name)
    if missing := set(names) - set(pages):
        raise MinivllmError(f"{site} has no live {', '.join(sorted(missing))}: run make site, with npm installed")
    return pages


@contextmanager
def pages(browser: Browser, names: list[str], times: int, site: Path) -> Iterator[Measure]:
    """Serve a built site, and measure widgets on its pages."""
    files = pages_of(names, site)
    with served(site) as address:
        yield lambda name, until: on_page(browser, f"{address}/lessons/{files[name]}", name, times, until)


def chromium() -> str:
    """Return Chromium's path.

    Raises:
        MinivllmError: this machine has none.
    """
    path = find_chromium()
    if not path:
        raise MinivllmError(f"no Chromium on this machine: {HOW_TO_GET_IT}")
    return path


@contextmanager
def notebooks(browser: Browser, names: list[str], times: int) -> Iterator[Measure]:
    """Start a JupyterLab with a notebook for each name, and measure widgets in it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "notebooks"
        folder.mkdir()
        for name in names:
            source = CONTROL if name == "control" else f"from widgets import {name}\n\n{name}.show()"
            cell = nbformat.v4.new_code_cell(source, id="widget")
            kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
            nbformat.write(nbformat.v4.new_notebook(cells=[cell], metadata=kernel), folder / f"{name}.ipynb")
        with jupyterlab(folder, Path(place) / "jupyter") as server:
            yield lambda name, until: in_notebook(browser, server, f"{name}.ipynb", times, until)


def shared_out(names: list[str], measure: Measure, seconds: float) -> dict[str, Figures]:
    """Measure each widget in an even share of the time that is left."""
    figures, ends = {}, time.monotonic() + seconds
    for left, name in zip(range(len(names), 0, -1), track(names, "widgets"), strict=True):
        now = time.monotonic()
        figures[name] = measure(name, now + max(ends - now, 0) / left)
    return figures


def show(place: str, figures: dict[str, Figures]) -> None:
    """Print the table of one place, and how many widgets reach the goal."""
    title = f"{place}: from a key press to the picture, and pictures per second while dragging"
    columns = f"starts, s {{starts:.1f}} | knobs {{knobs}} | {COLUMNS}" if place == "page" else COLUMNS
    record_table(title, figures, f"widget {{name}} | {columns}")
    medians = {name: row["median"] for name, row in figures.items() if name != "control"}
    slowest = max(medians, key=medians.__getitem__)
    within = sum(median <= GOAL for median in medians.values())
    console.print(f"{within} of {len(medians)} within {GOAL} ms; slowest {slowest}, {medians[slowest]:.0f} ms")


def main(arguments: argparse.Namespace) -> None:
    """Measure, print the tables and one line of JSON."""
    names, places = arguments.only or WIDGETS, [arguments.place] if arguments.place else [*PLACES]
    site, times, control = Path(arguments.site), arguments.times, Control(loads_cores=True)
    if "page" in places:
        pages_of(names, site)  # before minutes pass in the other place
    ends, figures = time.monotonic() + 60 * arguments.minutes, {}
    with sync_playwright() as playwright:
        browser = start_browser(playwright, chromium())
        for left, place in zip(range(len(places), 0, -1), places, strict=True):
            shown = ["control", *names] if place == "jupyterlab" else names
            opening = notebooks(browser, shown, times) if place == "jupyterlab" else pages(browser, shown, times, site)
            seconds = (ends - time.monotonic()) / left
            with control.watch(), opening as measure:
                figures[place] = shared_out(shown, measure, seconds)
    for place, rows in figures.items():
        show(place, rows)
    if words := control.disturbance():
        console.print(f"This machine was disturbed ({words}).")
    report(record("widgets", figures, disturbance=control.record()), arguments.json)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--place", choices=PLACES, help="measure only there (default: in both)")
    flags.add_argument("--only", choices=WIDGETS, action="append", help="measure only this widget (may be repeated)")
    flags.add_argument("--site", metavar="FOLDER", default=str(SITE), help="a built site (default: out/site)")
    flags.add_argument("--times", type=positive_int, default=3, help="most presses of each control in each direction")
    flags.add_argument("--minutes", type=positive_int, default=6, help="about how long it may take (default: 6)")
    return flags


if __name__ == "__main__":
    run(main, parser())
