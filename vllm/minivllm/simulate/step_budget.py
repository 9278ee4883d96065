"""A bound on code that is not ours: it may take so many steps, and a loop without an end is stopped."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from minivllm.errors import MinivllmError


class EndlessError(MinivllmError):
    """Code took more steps than it may."""


@contextmanager
def step_budget(steps: int, whose: str) -> Iterator[None]:
    """Inside, Python functions that are called take at most `steps` steps of the interpreter (bytecode instructions).

    Lines would not do: a loop that stands on one line runs for ever without beginning another.

    Raises:
        EndlessError: there were more; the message names `whose` code it is.
    """
    left = steps

    def count(frame: FrameType, event: str, _value: Any) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        left -= event == "opcode"
        if left < 0:
            raise EndlessError(f"{whose} took {steps:,} steps and did not come to an end; does a loop lack one?")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
