"""A sign of life for anything longer than two seconds: on a terminal and in a notebook, gone
when the work is done.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from html import escape
from typing import TypeVar

from rich.progress import Progress

from minivllm_lab.tables import console

Item = TypeVar("Item")
PER_SECOND = 4
"""Redraws on a terminal: each takes time from what is measured meanwhile."""


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield from `items`, and show how many are done; nothing is shown where the output goes
    into a file.
    """
    if console.is_jupyter:
        yield from _track_in_notebook(items, description, total)
    elif console.is_terminal:
        with Progress(console=console, transient=True, refresh_per_second=PER_SECOND) as bar:
            yield from bar.track(items, total=total, description=description)
    else:
        yield from items


@contextmanager
def working(description: str) -> Iterator[None]:
    """Show what is being done, for work whose steps cannot be counted."""
    if console.is_jupyter:
        with _line_in_notebook() as say:
            say(f"{description} …")
            yield
    elif console.is_terminal:
        with console.status(f"{description} …", refresh_per_second=PER_SECOND):
            yield
    else:
        yield


def _track_in_notebook(items: Iterable[Item], description: str, total: int | None) -> Iterator[Item]:
    total = total if total is not None else len(items) if isinstance(items, Sized) else None
    with _line_in_notebook() as say:
        for done, item in enumerate(items):
            say(f"{description} … {done} done" if total is None else f"{description} … {done} of {total} done")
            yield item


@contextmanager
def _line_in_notebook() -> Iterator[Callable[[str], None]]:
    """Show one line of a cell's output that can change. (Rich's leaves a widget without its state
    in the saved file.)
    """
    from IPython.display import display

    handle = display(_as_output(""), raw=True, display_id=True)
    assert handle is not None
    try:
        yield lambda words: handle.update(_as_output(words), raw=True)
    finally:
        handle.update(_as_output(""), raw=True)


def _as_output(words: str) -> dict[str, str]:
    return {"text/plain": words, "text/html": f"<i>{escape(words)}</i>" if words else ""}
