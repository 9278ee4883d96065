"""Programs in Triton's sense on a CPU: numba compiles them, and threads take them one by one from a
shared counter.

A loop is a function of its arguments, a record of cells (`cells.py`), and of element types:

    def multiply_panels(cells, element):
        x = array_at(cells.x, 1, element)
        for program in take_programs(counter_of(cells), cells.rows):
            ...

    programs_for = programs(PanelLinearCells, multiply_panels)

Then `programs_for(np.float32)` compiles it for float32, and returns a C function of the address of
the cells, which are written for each call. `platforms/threads.py` runs it on all threads at once.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core.typing.npydecl import parse_dtype
from numba.np.arrayobj import populate_array

from minivllm.logger import init_logger

logger = init_logger(__name__)
# It returns numba functions, which a type checker cannot see through.
intrinsic: Any = numba.extending.intrinsic

# What loops call. `exact_jit` is for arithmetic that must round as it is written.
_OPTIONS = {"error_model": "numpy", "nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
jit = njit(fastmath=True, **_OPTIONS)
exact_jit = njit(**_OPTIONS)

# Errors that numba's cache raises: no writable folder; the disk is full; a truncated file.
CACHE_ERRORS = (RuntimeError, OSError, EOFError, pickle.UnpicklingError)


@intrinsic
def array_at(typing_context, address, count, dtype):
    """Return the array of `count` numbers at an address.

    numba's `carray` does the same, but takes a tenth of a second to compile for each type.
    """
    element = parse_dtype(dtype)
    array_type = types.Array(element, 1, "C")

    def generate(context, builder, signature, arguments):
        stored = context.get_data_type(element)
        size = context.get_constant(types.intp, context.get_abi_sizeof(stored))
        array = context.make_array(array_type)(context, builder)
        data = builder.inttoptr(arguments[0], stored.as_pointer())
        populate_array(array, data=data, shape=[arguments[1]], strides=[size], itemsize=size, meminfo=None)
        return array._getvalue()

    return array_type(types.intp, types.intp, dtype), generate


@intrinsic
def counter_of(typing_context, cells):
    """Return the address of the counter, the first cell."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.intp(cells), generate


@intrinsic
def float_of(typing_context, bits):
    """Return the fp32 number that a cell holds, written by `cells.bits_of`."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@intrinsic
def as_int32(typing_context, number):
    """Return the bits of an fp32 number as an integer."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def is_int8(typing_context, element):
    """Return whether a loop's element type is int8. The compiler leaves out what needs another answer."""

    def generate(context, builder, signature, arguments):
        return context.get_constant(types.boolean, parse_dtype(element) == types.int8)

    return types.boolean(element), generate


@intrinsic
def add_to(typing_context, address, number):
    """Add to an int64 in memory, atomically, in one order for all threads; return what it was."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@njit(nogil=True)
def take_number(counter):
    """Take the number of the next program."""
    return add_to(counter, 1)


# What several loops call must not take cells: numba numbers record types again in every process and
# names compiled functions by these numbers, so two loops from its cache could bring different
# functions of one name.
@njit(nogil=True)
def take_programs(counter, count):
    """Yield the numbers of the programs that this thread takes, until all `count` are taken."""
    program = take_number(counter)
    while program < count:
        yield program
        program = take_number(counter)


@njit(nogil=True)
def take_groups(counter, count, size):
    """Yield the numbers below `count` that this thread takes; a program is `size` of them."""
    first = take_number(counter) * size
    while first < count:
        for number in range(first, min(first + size, count)):  # noqa: UP028 (numba knows no `yield from`)
            yield number
        first = take_number(counter) * size


def programs(cells: Any, loop: Callable[..., None], jit: Callable[..., Any] = jit) -> Callable[..., Any]:
    """Return a function that compiles `loop(cells, *elements)` for NumPy types, once for each, and
    returns what `compile_programs` does.
    """
    layout = np.dtype([(name, np.int64) for name, *_ in cells._fields_])
    compiled = jit(loop)

    @functools.cache
    def programs_for(*elements: type) -> Any:
        names = {"loop": compiled, "layout": layout, "elements": elements, "array_at": array_at}
        entry = FunctionType(_entry.__code__, {"__name__": __name__, **names})
        # numba's cache knows a function by its file, name and code, not by what it calls.
        types_of = (element.__name__ for element in elements)
        entry.__qualname__ = "-".join((loop.__module__, loop.__name__, *types_of, str(sources_changed())))
        return compile_programs(entry)

    return programs_for


def _entry(address):
    """Run a loop; its names are those that `programs` gives a copy of this function."""
    loop(array_at(address, 1, layout)[0], *elements)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def sources_changed() -> int:
    """Return when a source of the loops was last modified, in ns: part of a loop's key in numba's
    cache, which by itself looks at one file only.
    """
    return max(path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py"))


def compile_programs(function: Callable[[int], None]) -> Any:
    """Compile `function(address of its cells)` to a C function that may run on any thread, for
    `run_on_threads`.

    It is compiled once and cached on disk: beside the function's file, in the user's cache if that
    is read-only, or in `NUMBA_CACHE_DIR`. If nothing can be cached, every process compiles it
    again. The result's `was_cached` says which it was; None if nothing can be cached.
    """
    signature = types.void(types.intp)
    try:
        compiled: Any = cfunc(signature, cache=True)(function)  # compiles, or reads the cache, at once
        compiled.ctypes.was_cached = compiled.cache_hits > 0
    except CACHE_ERRORS as error:
        _warn_once()
        logger.debug("%s: %s", function.__module__, error)
        compiled: Any = cfunc(signature)(function)
        compiled.ctypes.was_cached = None
    return compiled.ctypes


@functools.cache
def _warn_once() -> None:
    logger.warning("Compiled loops cannot be kept on disk: set NUMBA_CACHE_DIR to a folder with room")
