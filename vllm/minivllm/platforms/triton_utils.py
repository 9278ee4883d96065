"""Triton for every file that defines kernels: `from minivllm.platforms.triton_utils import tl,
triton`.

Without a CUDA device, Triton's interpreter runs the same kernels on NumPy: slowly, but line for
line. The switch, `TRITON_INTERPRET`, is read when a kernel is *defined*, so it must be set before;
a value already set is kept. Where Triton has no wheel (macOS, Windows), a stand-in lets files that
define kernels be imported; launching one raises an error that says why it cannot run.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

from minivllm.errors import MinivllmError
from minivllm.platforms.interpreter import leave_out_what_is_not_used

HAS_TRITON = find_spec("triton") is not None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Read by `triton.jit`, so it must be set before any kernel is defined.
if HAS_TRITON and "TRITON_INTERPRET" not in os.environ and not _has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

# Whether kernels defined in this process run in the interpreter.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _KernelWithoutTriton:
    """The result of `triton.jit` without Triton: a kernel that can be inspected but not
    launched.
    """

    def __init__(self, function):
        self.fn = function

    def __getitem__(self, grid):
        raise MinivllmError(
            f"kernel {self.fn.__name__!r} cannot run: Triton has no build for this platform. "
            "Use Linux (or WSL) to run the kernels; everything else works here."
        )


class _NoTriton:
    """A stand-in for both `triton` and `triton.language`: every attribute lookup succeeds."""

    constexpr = int

    def __getattr__(self, name: str):
        return self

    def __call__(self, *args, **kwargs):
        return self

    @staticmethod
    def jit(function=None, **_):
        return _KernelWithoutTriton(function) if function else _KernelWithoutTriton

    @staticmethod
    def cdiv(numerator: int, denominator: int) -> int:
        return -(-numerator // denominator)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()


if TYPE_CHECKING:  # kernels are Triton's language in Python syntax, which a type checker cannot follow

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):
        """A stand-in for `triton.language` that allows any attribute, and `constexpr` in
        annotations.
        """

        constexpr: TypeAlias = Any

    triton: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl

    if INTERPRETED:
        leave_out_what_is_not_used()
else:
    triton = tl = _NoTriton()

__all__ = ["HAS_TRITON", "INTERPRETED", "tl", "triton"]
