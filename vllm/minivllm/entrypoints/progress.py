"""The progress bar of `LLM`'s calls. vLLM always uses tqdm; here the bar is rich's unless the
caller passes tqdm's class.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]
"""Takes note of one more that is done, and how many tokens it has brought."""


@contextmanager
def progress(use_tqdm: bool | Callable[..., Any], what: str, total: int) -> Iterator[Advance]:
    """Show a progress bar for the duration of a block. `use_tqdm` is True, False, or a class like
    tqdm's that makes the bar.
    """
    if callable(use_tqdm):
        bar = use_tqdm(total=total, desc=what)
        try:
            yield lambda tokens: bar.update(1)
        finally:
            bar.close()
        return
    # Into a file or a pipe, a bar would be thousands of lines.
    console = get_console()
    with _rich(disable=not (use_tqdm and (console.is_terminal or console.is_jupyter))) as bar:
        task = bar.add_task(what, total=total, tokens=0)
        yield lambda tokens: bar.update(task, advance=1, tokens=bar.tasks[task].fields["tokens"] + tokens)


def _rich(disable: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        transient=True,
        disable=disable,
    )
