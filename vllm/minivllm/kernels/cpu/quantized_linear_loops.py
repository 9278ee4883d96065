"""The CPU counterpart of `quantized_linear.py`'s kernel, compiled by numba.

A program takes 16 outputs, four at a time. For one or two rows of x it unpacks the integers
straight into the matmul, and multiplies each group's sums by its scale. For more rows it first
unpacks the four outputs' weights into a scratch buffer that stays in the nearest caches, and then
processes the rows four at a time: each unpacked weight is used for all rows, and each number of x
for four outputs. The whole weight is never unpacked at once.

The loop over the rows is inside the function that multiplies: a call passes arrays and lanes
through memory, and a call per 4 × 4 tile took as long as the tile itself.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from minivllm.kernels.cpu.cells import QuantizedLinearCells
from minivllm.kernels.cpu.lanes import load, load_one, multiply, multiply_add, store, store_sums, sum_fours, zero
from minivllm.kernels.cpu.programs import (
    array_at,
    cells_at,
    compile_programs,
    counter_of,
    layout_of,
    sources_changed,
    take_programs,
)

OUTPUTS = 16  # per program
FEW_ROWS = 2
CELLS = layout_of(QuantizedLinearCells)
jit = njit(fastmath=True, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@jit
def multiply_packed(out, out_at, x, x_at, packed, scales, first, width, group):
    """Compute four outputs from `first` on of one row of x, straight from the integers."""
    groups = width // group
    at = first * width
    a, b, c, d = zero(), zero(), zero(), zero()
    for index in range(groups):
        p, q, r, s = zero(), zero(), zero(), zero()
        for k in range(index * group, (index + 1) * group, 16):
            numbers = load(x, x_at + k)
            p = multiply_add(numbers, load(packed, at + k), p)
            q = multiply_add(numbers, load(packed, at + width + k), q)
            r = multiply_add(numbers, load(packed, at + 2 * width + k), r)
            s = multiply_add(numbers, load(packed, at + 3 * width + k), s)
        a = multiply_add(p, load_one(scales, first * groups + index), a)
        b = multiply_add(q, load_one(scales, (first + 1) * groups + index), b)
        c = multiply_add(r, load_one(scales, (first + 2) * groups + index), c)
        d = multiply_add(s, load_one(scales, (first + 3) * groups + index), d)
    store_sums(out, out_at, sum_fours(a, b, c, d))


@jit
def unpack_row(weights, at, packed, scales, row, width, group):
    """Dequantize a row of the weight to `weights`, starting at `at`."""
    groups = width // group
    for index in range(groups):
        scale = load_one(scales, row * groups + index)
        for k in range(index * group, (index + 1) * group, 16):
            store(weights, at + k, multiply(load(packed, row * width + k), scale))


@jit
def multiply_rows(out, out_at, outputs, x, rows, weights, width):
    """Compute four outputs of four rows at a time: sixteen sums, which fit the registers with
    their operands.
    """
    for row in range(0, rows - 3, 4):
        a0, b0, c0, d0 = zero(), zero(), zero(), zero()
        a1, b1, c1, d1 = zero(), zero(), zero(), zero()
        a2, b2, c2, d2 = zero(), zero(), zero(), zero()
        a3, b3, c3, d3 = zero(), zero(), zero(), zero()
        for k in range(0, width, 16):
            p, q = load(weights, k), load(weights, width + k)
            r, s = load(weights, 2 * width + k), load(weights, 3 * width + k)
            at = row * width + k
            numbers = load(x, at)
            a0, b0 = multiply_add(numbers, p, a0), multiply_add(numbers, q, b0)
            c0, d0 = multiply_add(numbers, r, c0), multiply_add(numbers, s, d0)
            numbers = load(x, at + width)
            a1, b1 = multiply_add(numbers, p, a1), multiply_add(numbers, q, b1)
            c1, d1 = multiply_add(numbers, r, c1), multiply_add(numbers, s, d1)
            numbers = load(x, at + 2 * width)
            a2, b2 = multiply_add(numbers, p, a2), multiply_add(numbers, q, b2)
            c2, d2 = multiply_add(numbers, r, c2), multiply_add(numbers, s, d2)
            numbers = load(x, at + 3 * width)
            a3, b3 = multiply_add(numbers, p, a3), multiply_add(numbers, q, b3)
            c3, d3 = multiply_add(numbers, r, c3), multiply_add(numbers, s, d3)
        into = out_at + row * outputs
        store_sums(out, into, sum_fours(a0, b0, c0, d0))
        store_sums(out, into + outputs, sum_fours(a1, b1, c1, d1))
        store_sums(out, into + 2 * outputs, sum_fours(a2, b2, c2, d2))
        store_sums(out, into + 3 * outputs, sum_fours(a3, b3, c3, d3))


@jit
def multiply_last_rows(out, out_at, outputs, x, rows, weights, width):
    """Compute four outputs of the remaining rows, one row at a time."""
    for row in range(rows // 4 * 4, rows):
        a, b, c, d = zero(), zero(), zero(), zero()
        for k in range(0, width, 16):
            numbers = load(x, row * width + k)
            a = multiply_add(numbers, load(weights, k), a)
            b = multiply_add(numbers, load(weights, width + k), b)
            c = multiply_add(numbers, load(weights, 2 * width + k), c)
            d = multiply_add(numbers, load(weights, 3 * width + k), d)
        store_sums(out, out_at + row * outputs, sum_fours(a, b, c, d))


@jit
def multiply_integers(cells, packed, scales):
    """Run programs, each for `OUTPUTS` outputs (at least four) and all rows, until none are
    left.
    """
    rows, outputs, width, group = cells.rows, cells.outputs, cells.width, cells.group
    x, out = array_at(cells.x, rows * width, np.float32), array_at(cells.out, rows * outputs, np.float32)
    weights = np.empty(4 * width, np.float32)  # four rows of the weight, unpacked
    for program in take_programs(counter_of(cells), (outputs + OUTPUTS - 1) // OUTPUTS):
        for start in range(program * OUTPUTS, min((program + 1) * OUTPUTS, outputs), 4):
            first = min(start, outputs - 4)  # if fewer than four are left, some are computed twice
            if rows <= FEW_ROWS:
                for row in range(rows):
                    multiply_packed(out, row * outputs + first, x, row * width, packed, scales, first, width, group)
                continue
            for output in range(4):
                unpack_row(weights, output * width, packed, scales, first + output, width, group)
            multiply_rows(out, first, outputs, x, rows, weights, width)
            multiply_last_rows(out, first, outputs, x, rows, weights, width)


@functools.cache
def programs_for(integers: Any, scale: Any) -> Any:
    """Compile `multiply_integers` for weights of `integers` with scales of `scale`, NumPy types
    as in `ELEMENTS`.
    """
    changed = sources_changed()

    def programs(address):
        _ = changed
        cells = cells_at(address, CELLS)
        multiply_integers(cells, array_at(cells.packed, 1, integers), array_at(cells.scales, 1, scale))

    return compile_programs(programs)
