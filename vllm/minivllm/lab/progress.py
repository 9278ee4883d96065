"""A progress bar for anything longer than two seconds."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import Progress

from minivllm.lab.tables import console

Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Yield from `items` with a progress bar that disappears when done; shown only on a terminal."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield from bar.track(items, total=total, description=description)
