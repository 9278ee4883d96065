"""Programs in Triton's sense on a CPU: numba compiles them, and threads take them one by one from a shared counter.

A function of programs is called with the address of its cells (`cells.py`), which are written for each call.
`platforms/threads.py` runs the function on all threads at once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types

from minivllm.kernels.cpu import cells, lanes
from minivllm.logger import init_logger

logger = init_logger(__name__)
intrinsic: Any = numba.extending.intrinsic  # it returns numba functions, which a type checker cannot see through

CACHE_ERRORS = (RuntimeError, OSError, EOFError, pickle.UnpicklingError)
"""Errors that numba's cache raises: no writable folder; the disk is full; a truncated file."""


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@njit
def array_at(address, shape, dtype):
    """The array at an address, row after row."""
    return carray(_pointer(address), shape, dtype)


def layout_of(kind: type[ctypes.Structure]) -> np.dtype:
    """Memory layout of the cells of `kind`, a class of `cells.py`."""
    return np.dtype([(name, np.int64) for name, *_ in kind._fields_])


@njit
def cells_at(address, layout):
    """The cells at an address, as a record: `cells_at(address, LAYOUT).rows`."""
    return array_at(address, 1, layout)[0]


@intrinsic
def take_number(typing_context, cells):
    """Atomically take the number of the next program. `cells` is as returned by `cells_at`."""

    def generate(context, builder, signature, arguments):
        counter = builder.bitcast(arguments[0], ir.IntType(64).as_pointer())  # the first cell
        return builder.atomic_rmw("add", counter, ir.IntType(64)(1), "monotonic")

    return types.int64(cells), generate


def sources_changed(*others: ModuleType) -> int:
    """The last modification time of this file, `cells.py`, `lanes.py` and `others` with compiled functions, in ns.

    A function to be compiled captures it as a closure variable. This makes it part of the key in numba's cache, which
    otherwise tracks only the function's own file. So each file writes this wrapper itself: a shared one would capture
    the compiled function too, which has another key in every process, and nothing would ever be found in the cache.
    """
    files = (__file__, *(module.__file__ for module in (cells, lanes, *others)))
    return max(os.stat(path).st_mtime_ns for path in files if path)


def compile_programs(function: Callable[[int], None]) -> Any:
    """`function(address of its cells)` as a C function that may run on any thread, for `run_on_threads`.

    Compiled once and cached on disk: beside the function's file, in the user's cache if that is read-only, or in
    `NUMBA_CACHE_DIR`. If nothing can be cached, every process compiles it again.
    """
    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True)(function).ctypes
    except CACHE_ERRORS as error:
        _warn_once()
        logger.debug("%s: %s", function.__module__, error)
        return cfunc(signature)(function).ctypes


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for calls from Python: compiled at its first call, and cached on disk as by `compile_programs`."""
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        try:
            if not kept:
                kept.append(njit(nogil=True, cache=True)(function))
            return kept[0](*arguments)
        except CACHE_ERRORS as error:  # before anything has run
            _warn_once()
            logger.debug("%s: %s", function.__module__, error)
            kept[:] = [njit(nogil=True)(function)]
            return kept[0](*arguments)

    return call


@functools.cache
def _warn_once() -> None:
    logger.warning("Compiled loops cannot be kept on disk: set NUMBA_CACHE_DIR to a folder with room")
