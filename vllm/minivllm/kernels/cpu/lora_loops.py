"""The CPU counterpart of `lora_linear.py`'s kernels, compiled by numba: shrink and expand in one
pass.

A program takes up to 16 rows of one slot, so an adapter's numbers are loaded once for all of them.
For each slice it writes A x, a few numbers a row, into a scratch buffer that stays in the nearest
cache, and adds B times these to y, 64 outputs at a time, which stay in registers meanwhile. Nothing
but y goes to memory, and all adapters and slices of a linear are one call.

A row of A has a dot product of its own for each row of x, so four of them are computed at once, for two
rows of x where there are two; a row of B is added to the outputs as it lies.
"""

from __future__ import annotations

import numpy as np

from minivllm.kernels.cpu.cells import LoRALinearCells
from minivllm.kernels.cpu.lanes import dot_rows, load, load_one, multiply_add, store, store_dots
from minivllm.kernels.cpu.programs import array_at, counter_of, jit, programs, take_programs
from minivllm.kernels.lora_metadata import CPU_TILE


@jit
def shrink(small, at, stride, x, starts, a, a_at, width, rank):
    """Write A x to small, `[rows, stride]`, for the rows of x at `starts`; up to three numbers beyond
    the rank are written too.
    """
    for r in range(0, rank, 4):
        store_dots(small, at + r, stride, dot_rows(x, starts, a, a_at + r * width, width, width))


@jit
def expand_row(y, y_at, small, at, b, b_at, outputs, first, last, rank):
    """Add B small to the outputs from `first` to `last` of one row of y."""
    column = first
    while column + 64 <= last:
        p, q = load(y, y_at + column), load(y, y_at + column + 16)
        s, t = load(y, y_at + column + 32), load(y, y_at + column + 48)
        for r in range(rank):
            number = load_one(small, at + r)
            line = b_at + r * outputs + column
            p, q = multiply_add(number, load(b, line), p), multiply_add(number, load(b, line + 16), q)
            s, t = multiply_add(number, load(b, line + 32), s), multiply_add(number, load(b, line + 48), t)
        store(y, y_at + column, p)
        store(y, y_at + column + 16, q)
        store(y, y_at + column + 32, s)
        store(y, y_at + column + 48, t)
        column += 64
    while column < last:
        p = load(y, y_at + column)
        for r in range(rank):
            p = multiply_add(load_one(small, at + r), load(b, b_at + r * outputs + column), p)
        store(y, y_at + column, p)
        column += 16


def add_adapters(cells, element):
    """Run programs, each for a tile of rows of one slot, until none are left."""
    num_tiles, slices, slots, max_rank = cells.tiles, cells.slices, cells.slots, cells.max_rank
    width, outputs, x_stride = cells.width, cells.outputs, cells.x_stride
    y, x = array_at(cells.y, 1, element), array_at(cells.x, 1, element)
    a, b = array_at(cells.a, 1, element), array_at(cells.b, 1, element)
    ranks = array_at(cells.ranks, slices * slots, np.int32)
    bounds = array_at(cells.bounds, slices + 1, np.int32)
    indices = array_at(cells.indices, 1, np.int32)
    table = array_at(cells.tile_table, 3 * num_tiles, np.int64)
    small = np.empty(CPU_TILE * max_rank, np.float32)  # A x of each row, in the nearest cache
    for tile in take_programs(counter_of(cells), num_tiles):
        slot, first, count = table[tile], table[num_tiles + tile], table[2 * num_tiles + tile]
        for piece in range(slices):
            rank = ranks[piece * slots + slot]
            a_at = (piece * slots + slot) * max_rank * width
            if rank == 0:
                continue  # this slot's adapter leaves the slice alone
            for row in range(0, count - 1, 2):
                starts = indices[first + row] * x_stride, indices[first + row + 1] * x_stride
                shrink(small, row * max_rank, max_rank, x, starts, a, a_at, width, rank)
            if count % 2:  # a last row alone
                start = indices[first + count - 1] * x_stride
                shrink(small, (count - 1) * max_rank, max_rank, x, (start,), a, a_at, width, rank)
            b_at = slot * max_rank * outputs
            for row in range(count):
                y_at = indices[first + row] * outputs
                expand_row(y, y_at, small, row * max_rank, b, b_at, outputs, bounds[piece], bounds[piece + 1], rank)


programs_for = programs(LoRALinearCells, add_adapters)
