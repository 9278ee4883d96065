"""The twin of `quantized_linear.py`'s kernel for a CPU, compiled by numba.

A program takes 16 outputs, four at a time. For one or two rows of x it unpacks the integers straight into the product,
and multiplies the sums of each group with its scale. For more rows it first writes the numbers of the four outputs into
a scratch that stays in the first-level cache, and then goes over the rows four by four: each number that was unpacked
meets all rows, and each number of x meets four outputs. The whole weight is never unpacked at once.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from minivllm.kernels import lanes
from minivllm.kernels.lanes import (
    array_at,
    load,
    load_one,
    multiply,
    multiply_add,
    store,
    sum_fours,
    take_number,
    zero,
)

OUTPUTS = 16  # of a program
FEW_ROWS = 2
BLOCK_SIZE = 9  # numbers in the block that `run_programs` reads
jit = njit(fastmath=True, error_model="numpy", nogil=True)


@jit
def put(out, at, count, sums, a, b, c, d):
    """Write up to four outputs of a row: the sums over all lanes of a, b, c, d."""
    store(sums, 0, sum_fours(a, b, c, d))
    for output in range(count):
        out[at + output] = sums[output] + sums[4 + output] + sums[8 + output] + sums[12 + output]


@jit
def multiply_packed(out, out_at, count, x, x_at, packed, scales, first, last, width, group, sums):
    """Outputs `first` to `first` + `count` of one row of x, straight from the integers; `last` fills up to four."""
    second, third, fourth = min(first + 1, last), min(first + 2, last), min(first + 3, last)
    groups = width // group
    a, b, c, d = zero(), zero(), zero(), zero()
    for index in range(groups):
        p, q, r, s = zero(), zero(), zero(), zero()
        for k in range(index * group, (index + 1) * group, 16):
            numbers = load(x, x_at + k)
            p = multiply_add(numbers, load(packed, first * width + k), p)
            q = multiply_add(numbers, load(packed, second * width + k), q)
            r = multiply_add(numbers, load(packed, third * width + k), r)
            s = multiply_add(numbers, load(packed, fourth * width + k), s)
        a = multiply_add(p, load_one(scales, first * groups + index), a)
        b = multiply_add(q, load_one(scales, second * groups + index), b)
        c = multiply_add(r, load_one(scales, third * groups + index), c)
        d = multiply_add(s, load_one(scales, fourth * groups + index), d)
    put(out, out_at + first, count, sums, a, b, c, d)


@jit
def unpack_row(weights, at, packed, scales, row, width, group):
    """The numbers of a row of the weight, to `weights` from `at` on."""
    groups = width // group
    for index in range(groups):
        scale = load_one(scales, row * groups + index)
        for k in range(index * group, (index + 1) * group, 16):
            store(weights, at + k, multiply(load(packed, row * width + k), scale))


@jit
def multiply_row(out, out_at, count, x, x_at, weights, width, sums):
    """Up to four outputs of one row of x."""
    a, b, c, d = zero(), zero(), zero(), zero()
    for k in range(0, width, 16):
        numbers = load(x, x_at + k)
        a = multiply_add(numbers, load(weights, k), a)
        b = multiply_add(numbers, load(weights, width + k), b)
        c = multiply_add(numbers, load(weights, 2 * width + k), c)
        d = multiply_add(numbers, load(weights, 3 * width + k), d)
    put(out, out_at, count, sums, a, b, c, d)


@jit
def multiply_four_rows(out, out_at, outputs, count, x, x_at, weights, width, sums):
    """Up to four outputs of four rows of x: sixteen sums, which fit the registers beside what they are made of."""
    a0, b0, c0, d0 = zero(), zero(), zero(), zero()
    a1, b1, c1, d1 = zero(), zero(), zero(), zero()
    a2, b2, c2, d2 = zero(), zero(), zero(), zero()
    a3, b3, c3, d3 = zero(), zero(), zero(), zero()
    for k in range(0, width, 16):
        p, q = load(weights, k), load(weights, width + k)
        r, s = load(weights, 2 * width + k), load(weights, 3 * width + k)
        row = load(x, x_at + k)
        a0, b0 = multiply_add(row, p, a0), multiply_add(row, q, b0)
        c0, d0 = multiply_add(row, r, c0), multiply_add(row, s, d0)
        row = load(x, x_at + width + k)
        a1, b1 = multiply_add(row, p, a1), multiply_add(row, q, b1)
        c1, d1 = multiply_add(row, r, c1), multiply_add(row, s, d1)
        row = load(x, x_at + 2 * width + k)
        a2, b2 = multiply_add(row, p, a2), multiply_add(row, q, b2)
        c2, d2 = multiply_add(row, r, c2), multiply_add(row, s, d2)
        row = load(x, x_at + 3 * width + k)
        a3, b3 = multiply_add(row, p, a3), multiply_add(row, q, b3)
        c3, d3 = multiply_add(row, r, c3), multiply_add(row, s, d3)
    put(out, out_at, count, sums, a0, b0, c0, d0)
    put(out, out_at + outputs, count, sums, a1, b1, c1, d1)
    put(out, out_at + 2 * outputs, count, sums, a2, b2, c2, d2)
    put(out, out_at + 3 * outputs, count, sums, a3, b3, c3, d3)


@jit
def run_programs(block, packed, scales):
    """Take programs, each for `OUTPUTS` outputs and all rows, until none is left.

    block, int64: the next program; rows, outputs, width of a row of the weight, group; addresses of x (float32),
    out (float32), packed, scales.
    """
    rows, outputs, width, group = block[1], block[2], block[3], block[4]
    x, out = array_at(block[5], rows * width, np.float32), array_at(block[6], rows * outputs, np.float32)
    weights, sums = np.empty(4 * width, np.float32), np.empty(16, np.float32)
    while True:
        program = take_number(block)
        if program * OUTPUTS >= outputs:
            return
        last = min((program + 1) * OUTPUTS, outputs) - 1
        for first in range(program * OUTPUTS, last + 1, 4):
            count = min(4, last + 1 - first)
            if rows <= FEW_ROWS:
                for row in range(rows):
                    where = (out, row * outputs, count, x, row * width)
                    multiply_packed(*where, packed, scales, first, last, width, group, sums)
                continue
            for output in range(4):
                unpack_row(weights, output * width, packed, scales, min(first + output, last), width, group)
            for row in range(0, rows - 3, 4):
                at = row * outputs + first
                multiply_four_rows(out, at, outputs, count, x, row * width, weights, width, sums)
            for row in range(rows // 4 * 4, rows):
                multiply_row(out, row * outputs + first, count, x, row * width, weights, width, sums)


@functools.cache
def programs_for(integers: Any, scale: Any) -> Any:
    """The C function that runs programs on weights of `integers` with scales of `scale`, NumPy types as lanes load them.

    Its argument is the address of the int64 block that `run_programs` reads. Compiled once, then kept on disk: beside
    this file, or in the user's cache where that is read-only, or nowhere where neither can be written.
    """

    lanes_changed = os.stat(lanes.__file__).st_mtime_ns  # part of the cache's key, which else knows of this file alone

    def programs(address):
        _ = lanes_changed
        block = array_at(address, BLOCK_SIZE, np.int64)
        run_programs(block, array_at(block[7], 1, integers), array_at(block[8], 1, scale))

    signature = types.void(types.intp)
    try:
        return cfunc(signature, cache=True)(programs).ctypes
    except RuntimeError:  # no place for the cache
        return cfunc(signature)(programs).ctypes
