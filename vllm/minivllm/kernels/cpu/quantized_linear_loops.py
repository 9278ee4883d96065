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

import numpy as np

from minivllm.kernels.cpu.cells import QuantizedLinearCells
from minivllm.kernels.cpu.lanes import dot_rows, load, load_one, multiply, multiply_add, store, store_dots, zero
from minivllm.kernels.cpu.programs import array_at, counter_of, jit, programs, take_programs

OUTPUTS = 16  # per program
FEW_ROWS = 2


@jit
def multiply_packed(out, out_at, x, x_at, packed, scales, first, width, group):
    """Compute four outputs from `first` on of one row of x, straight from the integers."""
    groups = width // group
    a, b, c, d = zero(), zero(), zero(), zero()
    for index in range(groups):
        start = index * group
        p, q, r, s = dot_rows(x, (x_at + start,), packed, first * width + start, width, group)
        a = multiply_add(p, load_one(scales, first * groups + index), a)
        b = multiply_add(q, load_one(scales, (first + 1) * groups + index), b)
        c = multiply_add(r, load_one(scales, (first + 2) * groups + index), c)
        d = multiply_add(s, load_one(scales, (first + 3) * groups + index), d)
    store_dots(out, out_at, 0, (a, b, c, d))


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
    """Compute four outputs of four rows at a time, sixteen sums, which fit the registers with their
    operands; then those of the last rows.
    """
    whole = rows // 4 * 4
    for row in range(0, whole, 4):
        at = row * width
        starts = (at, at + width, at + 2 * width, at + 3 * width)
        store_dots(out, out_at + row * outputs, outputs, dot_rows(x, starts, weights, 0, width, width))
    for row in range(whole, rows):
        store_dots(out, out_at + row * outputs, outputs, dot_rows(x, (row * width,), weights, 0, width, width))


def multiply_integers(cells, integers, scale):
    """Run programs, each for `OUTPUTS` outputs (at least four) and all rows, until none are
    left.
    """
    packed, scales = array_at(cells.packed, 1, integers), array_at(cells.scales, 1, scale)
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


programs_for = programs(QuantizedLinearCells, multiply_integers)
