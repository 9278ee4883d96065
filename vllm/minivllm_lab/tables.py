"""Tables on the terminal, all in one style, and in Markdown."""

import string
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)
MOST_COLUMNS = 80
"""Maximum line length of sentences: longer lines are hard to read, however wide the terminal."""


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None = None, *,
    words: bool = False,
) -> None:  # fmt: skip
    """Print `rows` under `columns`: the first is left-aligned, the others right-aligned, unless
    `words` is true.

    Title and caption use the full width of the terminal; rich would wrap them at the table's width.
    If the terminal is too narrow, number cells lose their margins first, and then a word continues
    on the next line: rich would cut its end.
    """
    grid = Table()
    for index, column in enumerate(columns):
        justify = "left" if index == 0 or words else "right"
        grid.add_column(column, justify=justify, no_wrap=index == 0 and not words, overflow="fold")
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    if not words and console.measure(grid, options=console.options.update(width=1000)).maximum > console.width:
        grid.padding = 0
    console.print(title, style="bold", markup=False)
    console.print(grid)
    if caption:
        console.print(caption, style="dim italic", markup=False)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, words: bool = False) -> str:
    """Return the lines of a Markdown table of `rows` under `columns`, aligned as `table` aligns
    them.
    """
    alignment = ["---", *["---" if words else "---:"] * (len(columns) - 1)]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (columns, alignment, *rows))


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, the way tables show them."""
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def heading(text: str) -> None:
    """Print the title of a script's next part."""
    console.print(f"\n[bold]{text}[/bold]")


class Timed(str):
    """A sentence for `closing` that depends on timings."""


def closing(*sentences: str, disturbance: str = "") -> None:
    """Print the three lines that every script ends with: what you saw.

    `disturbance` says what else kept this machine busy (`Control.disturbance`), if anything: one
    line then replaces all `Timed` sentences. Counted results hold on a busy machine too.
    """
    console.print("\n[bold]What you saw[/bold]")
    for sentence in sentences:
        if not (disturbance and isinstance(sentence, Timed)):
            _bullet(sentence)
    if disturbance and any(isinstance(sentence, Timed) for sentence in sentences):
        again = "no conclusion from timings; run again when it is idle"
        _bullet(f"This machine was disturbed ({disturbance}): {again}.")


def say(sentence: str, first: str = "", others: str = "") -> None:
    """Print a sentence, wrapped at words to 80 columns or the terminal's width, whichever is less;
    its lines begin with `first` and `others`.
    """
    width = min(console.width, MOST_COLUMNS)
    console.print(textwrap.fill(sentence, width, initial_indent=first, subsequent_indent=others), markup=False)


def _bullet(sentence: str) -> None:
    say(sentence, "  • ", "    ")


class _Cells(string.Formatter):
    """A formatter of cell templates: the format `ms` shows seconds as milliseconds, and a missing
    value leaves the cell empty.
    """

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "")

    def format_field(self, value: Any, format_spec: str) -> str:
        if value == "":
            return ""
        return ms(value) if format_spec == "ms" else super().format_field(value, format_spec)


def record_table(
    title: str, records: Mapping[Any, Mapping[str, Any]], columns: Mapping[str, str] | str, caption: str | None = None,
) -> None:  # fmt: skip
    """Print a row for each record.

    `columns` maps each column's heading to a template such as "{itl_p50_ms:.1f}". Its fields are
    the record's keys, and `name`, the key of the record itself. It may also be one line: "blocks
    {name} | p99, s {p99:.2f}". The format `ms` shows seconds as milliseconds; a missing value
    leaves the cell empty.
    """
    pairs = _heading_and_cell(columns) if isinstance(columns, str) else list(columns.items())
    cells = _Cells()
    rows = [
        [cells.vformat(template, (), {"name": name, **record}) for _, template in pairs]
        for name, record in records.items()
    ]
    table(title, [heading for heading, _ in pairs], rows, caption)


def _heading_and_cell(columns: str) -> list[tuple[str, str]]:
    pairs = [column.strip().partition("{") for column in columns.split("|")]
    return [(heading.strip(), brace + cell) for heading, brace, cell in pairs]
