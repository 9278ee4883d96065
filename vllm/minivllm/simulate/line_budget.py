"""A bound on code that is not ours: it may run so many lines of Python, and a loop without an end is stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from minivllm.errors import MinivllmError


class EndlessError(MinivllmError):
    """Code ran more lines than it may."""


@contextmanager
def line_budget(lines: int, whose: str) -> Iterator[None]:
    """Inside, at most `lines` lines of Python run in functions that are called there.

    Raises:
        EndlessError: there were more; the message names `whose` code it is.
    """
    left = lines

    def count(_frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise EndlessError(f"{whose} ran {lines:,} lines of code and did not come to an end; does a loop lack one?")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
