"""A live race on the terminal: the same text, written without a cache and with one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from minivllm_lab.tables import console

LINES = 14
REFRESH_SECONDS = 0.1


class Written(Protocol):
    """Hold the text so far, and the seconds of each step."""

    tokens: list[int]
    seconds: list[float]


class Runner:
    """One side of the race: a generation that advances a step at a time, and its own clock."""

    def __init__(self, name: str, steps: Iterator[Written], tokenizer: Any) -> None:
        self.name = name
        self.steps = steps
        self.tokenizer = tokenizer
        self.written: Written | None = None
        self.done = False

    @property
    def seconds(self) -> float:
        """Return the seconds that the steps so far took."""
        return sum(self.written.seconds) if self.written else 0.0

    def advance(self) -> None:
        """Generate one more token, or notice that all are written."""
        written = next(self.steps, None)
        self.done = written is None
        self.written = written or self.written

    def panel(self) -> Panel:
        """Return the last lines of the text in a frame, with the count and the clock below."""
        text, count = "", 0
        if self.written:
            text = self.tokenizer.decode(self.written.tokens)
            count = len(self.written.seconds)
        lines = text.split("\n")[-LINES:]
        lines += [""] * (LINES - len(lines))
        content = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
        state = "done" if self.done else "writing"
        subtitle = f"{count} tokens in {self.seconds:.1f} s, {state}"
        return Panel(content, title=self.name, subtitle=subtitle, border_style="green" if self.done else "dim")


def race(without: Iterator[Written], cached: Iterator[Written], tokenizer: Any) -> tuple[Any, Any]:
    """Run both generations to their ends and show them side by side.

    The runner whose clock is behind takes the next step, so at any moment both have had the same
    time. Drawing is not timed. The moment at which the cached runner was done stays on the screen.

    Returns:
        The last value of each.
    """
    runners = [Runner("without a cache", without, tokenizer), Runner("with a cache", cached, tokenizer)]
    photo = None
    with Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else nullcontext() as live:
        drawn = 0.0
        while racing := [runner for runner in runners if not runner.done]:
            behind = min(reversed(racing), key=lambda runner: runner.seconds)
            behind.advance()
            if photo is None and runners[1].done:
                photo = side_by_side(runners)
            if live and behind.seconds - drawn > REFRESH_SECONDS:
                drawn = behind.seconds
                live.update(side_by_side(runners), refresh=True)
    console.print("The same text, written twice. The moment when the cached one was done:")
    console.print(photo)
    slow, fast = (runner.seconds for runner in runners)
    console.print(f"In the end both wrote the same: in {slow:.1f} s without a cache, in {fast:.1f} s with one.\n")
    return runners[0].written, runners[1].written


def side_by_side(runners: Sequence[Runner]) -> Table:
    """Lay the runners' panels out in one row."""
    grid = Table.grid(expand=True)
    for _ in runners:
        grid.add_column(ratio=1)
    grid.add_row(*(runner.panel() for runner in runners))
    return grid
