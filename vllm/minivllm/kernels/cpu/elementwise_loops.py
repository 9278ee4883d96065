"""The CPU twins of `elementwise.py`'s kernels, compiled by numba: fp32 or bf16 in memory, fp32 lanes in between.

A program takes a few tokens; few tokens are one program, which wakes no other thread. numba's own `parallel=True` is no
choice here: it sets the number of threads of the OpenMP library that PyTorch uses as well, and so undoes
`torch.set_num_threads`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

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
from minivllm.kernels.cpu.programs import array_at, compile_programs, sources_changed, take_number

TOKENS = 16  # of a program
BLOCK_SIZE = 9  # numbers in the block that the programs read
ADD_RMS_NORM, SILU_AND_MUL, ROTATE_HEADS = range(3)  # what the block's second number asks for
jit = njit(fastmath=True, error_model="numpy", nogil=True)


@jit
def add_rms_norm_token(out, residual, x, weight, at, width, eps):
    """One token, whose numbers begin at `at`. What is normalised is the sum as the next layer will read it."""
    squares = zero()
    for i in range(at, at + width, WIDTH):
        store(residual, i, add(load(residual, i), load(x, i)))
        total = load(residual, i)
        squares = multiply_add(total, total, squares)
    scale = same(np.float32(1.0) / np.sqrt(sum_lanes(squares) / np.float32(width) + eps))
    for i in range(0, width, WIDTH):
        store(out, at + i, multiply(multiply(load(residual, at + i), scale), load(weight, i)))


@jit
def silu_and_mul_token(out, at, gate_up, gate_at, width):
    """One token, whose gates begin at `gate_at` and whose outcome at `at`."""
    for i in range(0, width, WIDTH):
        gate = load(gate_up, gate_at + i)
        store(out, at + i, multiply(multiply(gate, sigmoid(gate)), load(gate_up, gate_at + width + i)))


@jit
def rotate_token(heads, at, num_heads, half, table, turn_at):
    """The heads of one token, one after another from `at` on; cosines and sines at `turn_at`."""
    for first in range(at, at + num_heads * 2 * half, 2 * half):
        for i in range(0, half, WIDTH):
            a, b = load(heads, first + i), load(heads, first + half + i)
            cos, sin = load(table, turn_at + i), load(table, turn_at + half + i)
            store(heads, first + i, subtract(multiply(a, cos), multiply(b, sin)))
            store(heads, first + half + i, multiply_add(b, cos, multiply(a, sin)))


@jit
def run_add_rms_norm(block, out, residual, x, weight):
    """block, int64: the next program; ADD_RMS_NORM; tokens, width; addresses of out, residual, x, weight, eps."""
    tokens, width, eps = block[2], block[3], array_at(block[8], 1, np.float32)[0]
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            add_rms_norm_token(out, residual, x, weight, token * width, width, eps)


@jit
def run_silu_and_mul(block, out, gate_up):
    """block, int64: the next program; SILU_AND_MUL; tokens, width; addresses of out, gate_up."""
    tokens, width = block[2], block[3]
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            silu_and_mul_token(out, token * width, gate_up, 2 * token * width, width)


@jit
def run_rotate_heads(block, heads, table):
    """block, int64: the next program; ROTATE_HEADS; tokens, heads, head_dim, numbers from token to token; addresses of
    heads, table, positions (int64)."""
    tokens, num_heads, head_dim, stride = block[2], block[3], block[4], block[5]
    positions = array_at(block[8], tokens, np.int64)
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            rotate_token(heads, token * stride, num_heads, head_dim // 2, table, positions[token] * head_dim)


@functools.cache
def programs_for(element: Any) -> Any:
    """All three as one C function of the block's address, on arrays of `element` (np.float32; np.uint16: bfloat16)."""
    changed = sources_changed()

    def programs(address):
        _ = changed
        block = array_at(address, BLOCK_SIZE, np.int64)
        if block[1] == ADD_RMS_NORM:
            out, residual = array_at(block[4], 1, element), array_at(block[5], 1, element)
            run_add_rms_norm(block, out, residual, array_at(block[6], 1, element), array_at(block[7], 1, element))
        elif block[1] == SILU_AND_MUL:
            run_silu_and_mul(block, array_at(block[4], 1, element), array_at(block[5], 1, element))
        else:
            run_rotate_heads(block, array_at(block[6], 1, element), array_at(block[7], 1, element))

    return compile_programs(programs)
