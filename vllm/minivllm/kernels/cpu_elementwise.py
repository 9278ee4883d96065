"""The CPU twins of `elementwise.py`, compiled by numba: fp32, one pass each.

The loops are written so that LLVM makes vectors of them: no check for division by zero (`error_model="numpy"`), sums in
any order (`fastmath`), an exponential without a branch. Few tokens are not worth waking threads for: those go through
the serial form of the same loop.
"""

from __future__ import annotations

import os

import torch

# One pool of threads in the process: numba's layer "omp" finds the OpenMP library that torch has loaded.
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core.extending import intrinsic

PARALLEL_FROM = 256  # tokens
_LOOP = {"fastmath": True, "error_model": "numpy", "nogil": True, "cache": True}
_ONE = np.float32(1.0)


@intrinsic
def _power_of_two(typing_context, exponent):
    """2 to a whole float32 between -126 and 127, by writing the exponent's bits."""

    def build(context, builder, signature, arguments):
        whole = builder.fptosi(arguments[0], ir.IntType(32))
        biased = builder.add(whole, ir.Constant(ir.IntType(32), 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(ir.IntType(32), 23)), ir.FloatType())

    return types.float32(types.float32), build


@njit(inline="always", **_LOOP)
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
    return (power * rest + _ONE) * _power_of_two(whole)


@njit(inline="always", **_LOOP)
def _add_rms_norm_row(out, residual, x, weight, eps):
    squares = np.float32(0.0)
    for i in range(len(x)):
        total = residual[i] + x[i]
        residual[i] = total
        squares += total * total
    scale = _ONE / np.sqrt(squares / np.float32(len(x)) + eps)
    for i in range(len(x)):
        out[i] = residual[i] * scale * weight[i]


@njit(**_LOOP)
def _add_rms_norm_serial(out, residual, x, weight, eps):
    for token in range(len(x)):
        _add_rms_norm_row(out[token], residual[token], x[token], weight, eps)


@njit(parallel=True, **_LOOP)
def _add_rms_norm_parallel(out, residual, x, weight, eps):
    for token in prange(len(x)):
        _add_rms_norm_row(out[token], residual[token], x[token], weight, eps)


@njit(inline="always", **_LOOP)
def _silu_and_mul_row(out, gate, up):
    for i in range(len(out)):
        out[i] = gate[i] / (_ONE + _exp(-gate[i])) * up[i]


@njit(**_LOOP)
def _silu_and_mul_serial(out, gate_up):
    width = out.shape[1]
    for token in range(len(out)):
        _silu_and_mul_row(out[token], gate_up[token, :width], gate_up[token, width:])


@njit(parallel=True, **_LOOP)
def _silu_and_mul_parallel(out, gate_up):
    width = out.shape[1]
    for token in prange(len(out)):
        _silu_and_mul_row(out[token], gate_up[token, :width], gate_up[token, width:])


@njit(inline="always", **_LOOP)
def _rotate_token(heads, cos, sin):
    half = len(cos)
    for head in range(len(heads)):
        first, second = heads[head, :half], heads[head, half:]
        for pair in range(half):
            a, b = first[pair], second[pair]
            first[pair] = a * cos[pair] - b * sin[pair]
            second[pair] = b * cos[pair] + a * sin[pair]


@njit(**_LOOP)
def _rotate_heads_serial(heads, positions, table):
    half = heads.shape[2] // 2
    for token in range(len(heads)):
        turn = table[positions[token]]
        _rotate_token(heads[token], turn[:half], turn[half:])


@njit(parallel=True, **_LOOP)
def _rotate_heads_parallel(heads, positions, table):
    half = heads.shape[2] // 2
    for token in prange(len(heads)):
        turn = table[positions[token]]
        _rotate_token(heads[token], turn[:half], turn[half:])


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `elementwise.add_rms_norm`."""
    out = torch.empty_like(x)
    loop = _add_rms_norm_parallel if len(x) >= PARALLEL_FROM else _add_rms_norm_serial
    loop(out.numpy(), residual.numpy(), x.numpy(), weight.numpy(), np.float32(eps))
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `elementwise.silu_and_mul`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
    loop = _silu_and_mul_parallel if len(out) >= PARALLEL_FROM else _silu_and_mul_serial
    loop(out.numpy(), gate_up.numpy())
    return out


def rotate_heads(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """As `elementwise.rotate_heads`."""
    loop = _rotate_heads_parallel if len(heads) >= PARALLEL_FROM else _rotate_heads_serial
    loop(heads.numpy(), positions.numpy(), table.numpy())
