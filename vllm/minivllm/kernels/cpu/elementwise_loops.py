"""CPU counterparts of `elementwise.py`'s kernels, compiled by numba: fp32 or bf16 in memory, fp32
arithmetic.

A program takes `TOKENS` tokens, so a small step is one program and wakes no other thread. numba's
own `parallel=True` is not an option: it sets the thread count of the OpenMP library that PyTorch
uses too, and so overrides `torch.set_num_threads`.
"""

from __future__ import annotations

import numpy as np

from minivllm.kernels.cpu.cells import GateCells, NormCells, RotationCells
from minivllm.kernels.cpu.lanes import (
    WIDTH,
    add,
    load,
    multiply,
    multiply_add,
    same,
    sigmoid,
    store,
    subtract,
    sum_lanes,
    zero,
)
from minivllm.kernels.cpu.programs import array_at, counter_of, float_of, programs, take_groups

TOKENS = 16  # per program


def add_rms_norms(cells, element):
    """Add x to the residual stream, and normalize the sums."""
    width, eps = cells.width, float_of(cells.eps)
    out, residual = array_at(cells.out, 1, element), array_at(cells.residual, 1, element)
    x, weight = array_at(cells.x, 1, element), array_at(cells.weight, 1, element)
    for token in take_groups(counter_of(cells), cells.tokens, TOKENS):
        at = token * width
        squares = zero()
        for i in range(at, at + width, WIDTH):
            store(residual, i, add(load(residual, i), load(x, i)))
            total = load(residual, i)  # as stored, rounded: the next layer reads this
            squares = multiply_add(total, total, squares)
        scale = same(np.float32(1.0) / np.sqrt(sum_lanes(squares) / np.float32(width) + eps))
        for i in range(0, width, WIDTH):
            store(out, at + i, multiply(multiply(load(residual, at + i), scale), load(weight, i)))


def multiply_gates(cells, element):
    """Multiply up by silu(gate); a token's gates come before its ups."""
    width = cells.width
    out, gate_up = array_at(cells.out, 1, element), array_at(cells.gate_up, 1, element)
    for token in take_groups(counter_of(cells), cells.tokens, TOKENS):
        gate_at = 2 * token * width
        for i in range(0, width, WIDTH):
            gate = load(gate_up, gate_at + i)
            up = load(gate_up, gate_at + width + i)
            store(out, token * width + i, multiply(multiply(gate, sigmoid(gate)), up))


def rotate_tokens(cells, element):
    """Rotate each token's heads, which lie one after another, by its row of cosines and sines."""
    head_dim, half = cells.head_dim, cells.head_dim // 2
    heads, table = array_at(cells.heads, 1, element), array_at(cells.table, 1, element)
    positions = array_at(cells.positions, cells.tokens, np.int64)
    for token in take_groups(counter_of(cells), cells.tokens, TOKENS):
        at, turn_at = token * cells.token_stride, positions[token] * head_dim
        for first in range(at, at + cells.num_heads * head_dim, head_dim):
            for i in range(0, half, WIDTH):
                a = load(heads, first + i)
                b = load(heads, first + half + i)
                cos = load(table, turn_at + i)
                sin = load(table, turn_at + half + i)
                store(heads, first + i, subtract(multiply(a, cos), multiply(b, sin)))
                store(heads, first + half + i, multiply_add(b, cos, multiply(a, sin)))


norms_of = programs(NormCells, add_rms_norms)
gates_of = programs(GateCells, multiply_gates)
rotations_of = programs(RotationCells, rotate_tokens)
