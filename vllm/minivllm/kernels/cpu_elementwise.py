"""The CPU twins of `elementwise.py`, compiled by numba: fp32, one pass each.

The loops are written so that LLVM makes vectors of them: no check for division by zero (`error_model="numpy"`), sums in
any order (`fastmath`), an exponential without a branch. A program takes a few tokens; few tokens are one program, which
wakes no other thread. numba's own `parallel=True` is no choice here: it sets the number of threads of the OpenMP
library that PyTorch uses as well, and so undoes `torch.set_num_threads`.
"""

from __future__ import annotations

import functools
from array import array
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types

from minivllm.kernels.programs import array_at, compile_programs, intrinsic, sources_changed, take_number
from minivllm.kernels.torch_threads import run_programs

TOKENS = 16  # of a program
BLOCK_SIZE = 9  # numbers in the block that the programs read
ADD_RMS_NORM, SILU_AND_MUL, ROTATE_HEADS = range(3)  # what the block's second number asks for
LOOP = {"fastmath": True, "error_model": "numpy", "nogil": True}
ONE = np.float32(1.0)


@intrinsic
def _power_of_two(typing_context, exponent):
    """2 to a whole float32 between -126 and 127, by writing the exponent's bits."""

    def build(context, builder, signature, arguments):
        whole = builder.fptosi(arguments[0], ir.IntType(32))
        biased = builder.add(whole, ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.float32), build


@njit(inline="always", **LOOP)
def _exp(x):
    """e to the x, to within 3 units in the last place: 2^(whole + rest), the rest by a polynomial (Cephes `exp2f`)."""
    x = min(max(x * np.float32(1.4426950408889634), np.float32(-126.0)), np.float32(126.0))
    whole = np.floor(x + np.float32(0.5))
    rest = x - whole
    power = np.float32(1.535336188319500e-4)
    power = power * rest + np.float32(1.339887440266574e-3)
    power = power * rest + np.float32(9.618437357674640e-3)
    power = power * rest + np.float32(5.550332471162809e-2)
    power = power * rest + np.float32(2.402264791363012e-1)
    power = power * rest + np.float32(6.931472028550421e-1)
    return (power * rest + ONE) * _power_of_two(whole)


@njit(inline="always", **LOOP)
def add_rms_norm_row(out, residual, x, weight, eps):
    """One token."""
    squares = np.float32(0.0)
    for i in range(len(x)):
        total = residual[i] + x[i]
        residual[i] = total
        squares += total * total
    scale = ONE / np.sqrt(squares / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = residual[i] * scale * weight[i]


@njit(**LOOP)
def run_add_rms_norm(block):
    """block, int64: the next program, the operation; tokens, width; addresses of out, residual, x, weight, eps."""
    tokens, width = block[2], block[3]
    out, residual = array_at(block[4], (tokens, width), np.float32), array_at(block[5], (tokens, width), np.float32)
    x, weight = array_at(block[6], (tokens, width), np.float32), array_at(block[7], width, np.float32)
    eps = array_at(block[8], 1, np.float32)[0]
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            add_rms_norm_row(out[token], residual[token], x[token], weight, eps)


@njit(inline="always", **LOOP)
def silu_and_mul_row(out, gate, up):
    """One token."""
    for i in range(len(out)):
        out[i] = gate[i] / (ONE + _exp(-gate[i])) * up[i]


@njit(**LOOP)
def run_silu_and_mul(block):
    """block, int64: the next program, the operation; tokens, width; addresses of out, gate_up."""
    tokens, width = block[2], block[3]
    out = array_at(block[4], (tokens, width), np.float32)
    gate_up = array_at(block[5], (tokens, 2 * width), np.float32)
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            silu_and_mul_row(out[token], gate_up[token, :width], gate_up[token, width:])


@njit(inline="always", **LOOP)
def rotate_token(heads, num_heads, cos, sin):
    """The heads of one token, one after another."""
    half = len(cos)
    for head in range(num_heads):
        at = head * 2 * half
        first, second = heads[at : at + half], heads[at + half : at + 2 * half]
        for pair in range(half):
            a, b = first[pair], second[pair]
            first[pair] = a * cos[pair] - b * sin[pair]
            second[pair] = b * cos[pair] + a * sin[pair]


@njit(**LOOP)
def run_rotate_heads(block):
    """block, int64: the next program, the operation; tokens, heads, head_dim, numbers from token to token; addresses of
    heads, positions (int64), table."""
    tokens, num_heads, head_dim, stride = block[2], block[3], block[4], block[5]
    positions = array_at(block[7], tokens, np.int64)
    half = head_dim // 2
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            heads = array_at(block[6] + 4 * token * stride, num_heads * head_dim, np.float32)
            turn = array_at(block[8] + 4 * positions[token] * head_dim, head_dim, np.float32)
            rotate_token(heads, num_heads, turn[:half], turn[half:])


@functools.cache
def _programs() -> Any:
    """All three as one C function of the block's address."""
    changed = sources_changed()

    def programs(address):
        _ = changed
        block = array_at(address, BLOCK_SIZE, np.int64)
        if block[1] == ADD_RMS_NORM:
            run_add_rms_norm(block)
        elif block[1] == SILU_AND_MUL:
            run_silu_and_mul(block)
        else:
            run_rotate_heads(block)

    return compile_programs(programs)


def _run(operation: int, tokens: int, *numbers: int) -> None:
    """Run the operation's programs for so many tokens, on no more threads than there are programs."""
    run_programs(_programs(), (operation, tokens, *numbers), most_threads=-(-tokens // TOKENS))


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `elementwise.add_rms_norm`."""
    out, small = torch.empty_like(x), array("f", [eps])
    addresses = (tensor.data_ptr() for tensor in (out, residual, x, weight))
    _run(ADD_RMS_NORM, *x.shape, *addresses, small.buffer_info()[0])
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `elementwise.silu_and_mul`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    _run(SILU_AND_MUL, *out.shape, out.data_ptr(), gate_up.data_ptr())
    return out


def rotate_heads(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """As `elementwise.rotate_heads`."""
    addresses = (tensor.data_ptr() for tensor in (heads, positions, table))
    _run(ROTATE_HEADS, *heads.shape, heads.stride(0), *addresses)
