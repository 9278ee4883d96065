"""Triton's interpreter, spared work of which nothing is ever seen: attention takes less than half the time.

What kernels compute stays as it is. `platforms/triton_utils.py` asks for it where kernels are interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import triton.language as tl
from triton.runtime import interpreter


def spare_unseen_work() -> None:
    """Takes both out of the interpreter, for all kernels of this process."""
    _check_no_overflow()
    _patch_once_a_launch()


def _check_no_overflow() -> None:
    """Each sum of integers would be computed again, wider, to assert that it fits, which only `debug` asserts."""
    builder = cast(Any, interpreter.interpreter_builder)
    builder.options = replace(builder.options, sanitize_overflow=False)


def _patch_once_a_launch() -> None:
    """A launch puts NumPy under the functions of `tl`; each call from kernel to kernel would do so again."""
    interpreted = cast(Any, interpreter.InterpretedFunction)
    patch_and_call = interpreted.__call__

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in _languages_of(self.fn)):
            return patch_and_call(self, *arguments, **named)
        return self.rewrite()(*arguments, **named)

    interpreted.__call__ = call


def _languages_of(function: Any) -> list[Any]:
    """The modules of Triton's language that a kernel's file knows."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
