"""Programs in the sense of Triton, for a CPU: numba compiles them, threads take them one by one from a shared counter.

A function of programs reads its arguments from a block of int64: first the number of the next program, then sizes and
the addresses of arrays. The block is written anew for every call; `platforms/threads.py` runs the function on all threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba.extending
from llvmlite import ir
from numba import carray, cfunc, njit, types

from minivllm.kernels.cpu import lanes

intrinsic: Any = numba.extending.intrinsic  # the functions that it makes are numba's, not a type checker's


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@njit
def array_at(address, shape, dtype):
    """The array, row after row, that lies at an address."""
    return carray(_pointer(address), shape, dtype)


@intrinsic
def take_number(typing_context, numbers):
    """numbers[0], which is one more for whoever asks next, on whatever thread."""

    def generate(context, builder, signature, arguments):
        first = context.make_array(numbers)(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", first, ir.IntType(64)(1), "monotonic")

    return types.int64(numbers), generate


def sources_changed() -> int:
    """When this file or `lanes.py` was last changed, in ns. Keep it in a variable that the function to compile reads.

    It is then part of the key in numba's cache, which else knows of the function's own file alone.
    """
    return max(os.stat(path).st_mtime_ns for path in (__file__, lanes.__file__))


def compile_programs(function: Callable[[int], None]) -> Any:
    """`function(address of the block)` as a C function that may run on any thread, for `run_on_threads`.

    Compiled once, then kept on disk: beside the function's file, or in the user's cache where that is read-only, or
    nowhere where neither can be written.
    """
    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True)(function).ctypes
    except RuntimeError:  # no place for the cache
        return cfunc(signature)(function).ctypes
