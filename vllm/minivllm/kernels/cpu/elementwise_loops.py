"""CPU counterparts of `elementwise.py`'s kernels, compiled by numba: fp32 or bf16 in memory, fp32
arithmetic.

A program takes `TOKENS` tokens, so a small step is one program and wakes no other thread. numba's
own `parallel=True` is not an option: it sets the thread count of the OpenMP library that PyTorch
uses too, and so overrides `torch.set_num_threads`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

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
from minivllm.kernels.cpu.programs import (
    array_at,
    cells_at,
    compile_programs,
    counter_of,
    float_of,
    layout_of,
    sources_changed,
    take_programs,
)

TOKENS = 16  # per program
NORM, GATE, ROTATION = layout_of(NormCells), layout_of(GateCells), layout_of(RotationCells)
jit = njit(fastmath=True, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@jit
def add_rms_norm_token(out, residual, x, weight, at, width, eps):
    """Add and normalize one token, whose numbers start at `at`."""
    squares = zero()
    for i in range(at, at + width, WIDTH):
        store(residual, i, add(load(residual, i), load(x, i)))
        total = load(residual, i)  # as stored, rounded: the next layer reads this
        squares = multiply_add(total, total, squares)
    scale = same(np.float32(1.0) / np.sqrt(sum_lanes(squares) / np.float32(width) + eps))
    for i in range(0, width, WIDTH):
        store(out, at + i, multiply(multiply(load(residual, at + i), scale), load(weight, i)))


@jit
def silu_and_mul_token(out, at, gate_up, gate_at, width):
    """Multiply one token's up by silu(gate); its gates start at `gate_at`, its result at `at`."""
    for i in range(0, width, WIDTH):
        gate = load(gate_up, gate_at + i)
        store(out, at + i, multiply(multiply(gate, sigmoid(gate)), load(gate_up, gate_at + width + i)))


@jit
def rotate_token(heads, at, num_heads, half, table, turn_at):
    """Rotate the heads of one token, one after another, starting at `at`; cosines and sines start at
    `turn_at`.
    """
    for first in range(at, at + num_heads * 2 * half, 2 * half):
        for i in range(0, half, WIDTH):
            a = load(heads, first + i)
            b = load(heads, first + half + i)
            cos = load(table, turn_at + i)
            sin = load(table, turn_at + half + i)
            store(heads, first + i, subtract(multiply(a, cos), multiply(b, sin)))
            store(heads, first + half + i, multiply_add(b, cos, multiply(a, sin)))


@jit
def add_rms_norms(cells, out, residual, x, weight):
    """Run programs until none are left."""
    tokens, width, eps = cells.tokens, cells.width, float_of(cells.eps)
    for program in take_programs(counter_of(cells), (tokens + TOKENS - 1) // TOKENS):
        for token in range(program * TOKENS, min((program + 1) * TOKENS, tokens)):
            add_rms_norm_token(out, residual, x, weight, token * width, width, eps)


@jit
def multiply_gates(cells, out, gate_up):
    """Run programs until none are left."""
    tokens, width = cells.tokens, cells.width
    for program in take_programs(counter_of(cells), (tokens + TOKENS - 1) // TOKENS):
        for token in range(program * TOKENS, min((program + 1) * TOKENS, tokens)):
            silu_and_mul_token(out, token * width, gate_up, 2 * token * width, width)


@jit
def rotate_tokens(cells, heads, table):
    """Run programs until none are left."""
    tokens, num_heads, head_dim, stride = cells.tokens, cells.num_heads, cells.head_dim, cells.token_stride
    positions = array_at(cells.positions, tokens, np.int64)
    for program in take_programs(counter_of(cells), (tokens + TOKENS - 1) // TOKENS):
        for token in range(program * TOKENS, min((program + 1) * TOKENS, tokens)):
            rotate_token(heads, token * stride, num_heads, head_dim // 2, table, positions[token] * head_dim)


@functools.cache
def norms_of(element: Any) -> Any:
    """Compile `add_rms_norms` for arrays of `element`, np.float32 or np.uint16 (bfloat16); it
    takes `NormCells`.
    """
    changed = sources_changed()

    def norms(address):
        _ = changed
        cells = cells_at(address, NORM)
        out, residual = array_at(cells.out, 1, element), array_at(cells.residual, 1, element)
        add_rms_norms(cells, out, residual, array_at(cells.x, 1, element), array_at(cells.weight, 1, element))

    return compile_programs(norms)


@functools.cache
def gates_of(element: Any) -> Any:
    """Compile `multiply_gates` for arrays of `element`, np.float32 or np.uint16 (bfloat16); it
    takes `GateCells`.
    """
    changed = sources_changed()

    def gates(address):
        _ = changed
        cells = cells_at(address, GATE)
        multiply_gates(cells, array_at(cells.out, 1, element), array_at(cells.gate_up, 1, element))

    return compile_programs(gates)


@functools.cache
def rotations_of(element: Any) -> Any:
    """Compile `rotate_tokens` for arrays of `element`, np.float32 or np.uint16 (bfloat16); it
    takes `RotationCells`.
    """
    changed = sources_changed()

    def rotations(address):
        _ = changed
        cells = cells_at(address, ROTATION)
        rotate_tokens(cells, array_at(cells.heads, 1, element), array_at(cells.table, 1, element))

    return compile_programs(rotations)
