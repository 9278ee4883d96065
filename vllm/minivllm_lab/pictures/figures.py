"""Figures of the lessons: one style, and reproducible files. Matplotlib is imported only when a
figure is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.pictures import palette
from minivllm_lab.results import ensure_writable

SMALL_TEXT = 9
"""The smallest size of text in points: 12 pixels."""
STYLE: Any = {  # matplotlib types the names of its settings as literals
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": palette.GREY,
    "axes.labelcolor": palette.INK,
    "xtick.color": palette.INK,
    "ytick.color": palette.INK,
    "text.color": palette.INK,
    "legend.frameon": False,
    "svg.hashsalt": "lessons",  # otherwise every drawing gets different ids
}


@contextmanager
def panels(path: str | Path, columns: int, width: float = 3.64, height: float = 3.4) -> Iterator[list]:
    """Yield `columns` axes side by side, each `width` inches wide; on exit the figure is written to
    `path`. Two columns of the default width are 700 pixels, so that no page shrinks their text.

    The extension, .svg or .png, selects the format. The file holds no date, but the description
    holds the plotted data as JSON, so that drawings of the same data can be recognized whatever
    version of matplotlib made them.
    """
    ensure_writable(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MinivllmError("drawing needs matplotlib, which is not installed here; leave --plot out") from None
    with rc_context(STYLE):
        figure = Figure(figsize=(columns * width, height), layout="constrained")
        yield list(figure.subplots(1, columns, squeeze=False)[0])
        description = json.dumps([shown_on(axes) for axes in figure.axes], ensure_ascii=False)
        undated = {"Date": None} if Path(path).suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata={"Description": description, **undated})


def shown_on(axes: Any) -> dict[str, Any]:
    """Return the contents of one panel as plain data: its text, lines and bars, numbers to four
    digits.
    """
    words = [axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
    names = [label.get_text() for axis in (axes.xaxis, axes.yaxis) for label in _own_labels(axis)]
    lines = [[_rounded(line.get_xdata(False)), _rounded(line.get_ydata(False))] for line in axes.lines]
    bars = [patch for patch in axes.patches if hasattr(patch, "get_height")]
    corners = [_rounded((*bar.get_xy(), bar.get_width(), bar.get_height())) for bar in bars]
    legend = axes.get_legend_handles_labels()[1]
    return {"words": words, "names": names, "legend": legend, "lines": lines, "bars": corners}


def _own_labels(axis: Any) -> list[Any]:
    """Return the tick labels set by the drawing; matplotlib chooses all others, which vary by its
    version.
    """
    from matplotlib.category import StrCategoryLocator
    from matplotlib.ticker import FixedLocator

    chosen = isinstance(axis.get_major_locator(), (FixedLocator, StrCategoryLocator))
    return axis.get_ticklabels() if chosen else []


def _rounded(values: Iterable[Any]) -> list[float | None]:
    return [float(f"{float(value):.4g}") if math.isfinite(value) else None for value in values]


def curves(axes: Any, lines: Mapping[str, Mapping[Any, float]], factor: float = 1.0, octaves: bool = False) -> None:
    """Draw `{name: {x: y}}`, one line with markers per name; x may be a string, as in results
    files.

    `factor` multiplies y (100 for percent). With `octaves`, x is on a log2 scale with a tick at
    each x.
    """
    for (name, points), colour in zip(lines.items(), palette.SERIES, strict=False):
        axes.plot([int(x) for x in points], [factor * y for y in points.values()], "o-", color=colour, label=name)
    if octaves:
        ticks = sorted({int(x) for points in lines.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=SMALL_TEXT)
    if len(lines) > 1:
        axes.legend(fontsize=SMALL_TEXT)


def dotted(axes: Any, rows: Mapping[str, Mapping[str, float]], colours: Iterable[str]) -> None:
    """Draw `{row: {name: value}}` on a logarithmic x axis: a line for each row, from the top down,
    with a dot for each name. A bar's length would say nothing there.
    """
    names = dict.fromkeys(name for values in rows.values() for name in values)
    for (name, colour), marker in zip(zip(names, colours, strict=False), "osD^", strict=False):
        known = {place: values[name] for place, values in enumerate(rows.values()) if name in values}
        axes.plot(list(known.values()), list(known), marker, color=colour, label=name)
    axes.set(xscale="log", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.grid(axis="y", color=palette.PALE)
    axes.set_axisbelow(True)
