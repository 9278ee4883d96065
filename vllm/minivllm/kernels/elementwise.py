"""The small operations between the matrix products of a decoder layer, each in one pass over its
data.

In torch, each of them takes two to six calls. Every call reads and writes all of its data, and has
its own overhead: a launch on a GPU, some microseconds on a CPU.

    add_rms_norm    residual += x;  out = residual / rms(residual) × weight     moves 4 × tokens × width elements
    silu_and_mul    out = silu(gate) × up                                       moves 3 × tokens × width elements
    rotate_heads    rotates each pair of a head's elements by its position       moves 2 × tokens × heads × head_dim

Layouts: rows are contiguous; a row of `gate_up` holds gate, then up; a row of the rotary `table`
holds the cosines of a position, then the sines. The arithmetic is fp32. Grid: a program for each
token; in `rotate_heads` for each token and head.

On a CPU numba compiles the same passes (`cpu/elementwise_loops.py`) for fp32 and bf16, if a row's
width is a multiple of 16; otherwise, or without numba, torch is called. Measured on one core, µs,
128 tokens of the embedded model:

                    torch, fp32    one pass    torch, bf16    one pass
    add_rms_norm             35          13             48          17
    silu_and_mul             61          29             91          44
    rotate_heads             76          16            105          17

In vLLM v0.33.0: `fused_add_rms_norm`, `silu_and_mul`, `rotary_embedding`, registered in
`csrc/torch_bindings.cpp`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.loops import loops
from minivllm.platforms.threads import has_numba
from minivllm.platforms.triton_utils import tl, triton

CHUNK = 2048  # elements per program: 16 bytes per thread and load


@triton.jit
def add_rms_norm_kernel(out, residual, x, weight, eps, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr):
    """Grid (tokens,)."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, PADDED_WIDTH)
    mask = column < WIDTH
    before = tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
    total = before + tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual + row + column, stored, mask=mask)
    total = stored.to(tl.float32)  # normalize the rounded sum, as the next layer will read it
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / WIDTH + eps)
    result = total * scale * tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(out, gate_up, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (tokens, chunks of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = column < WIDTH
    gate = tl.load(gate_up + token * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + token * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate_heads_kernel(heads, positions, table, token_stride, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr):
    """Grid (tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, PADDED_HALF)
    mask = pair < half
    turn = table + tl.load(positions + token).to(tl.int64) * HEAD_DIM + pair
    cos = tl.load(turn, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(turn + half, mask=mask, other=0.0).to(tl.float32)
    at = heads + token * token_stride + tl.program_id(1) * HEAD_DIM + pair
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (first * cos - second * sin).to(heads.dtype.element_ty), mask=mask)
    tl.store(at + half, (second * cos + first * sin).to(heads.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """Add `x` to `residual` in place, and return the normalized sum; all are [tokens, width],
    `weight` is [width].
    """
    width = x.shape[-1]
    if choose_backend(backend, x) == "triton":
        out = torch.empty_like(x)
        if len(x):
            sizes = {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}
            num_warps = 8 if width >= 4096 else 4
            add_rms_norm_kernel[(len(x),)](out, residual, x, weight, eps, num_warps=num_warps, **sizes)
        return out
    if has_numba() and _cpu().can_run(width, x, residual, weight):
        return _cpu().add_rms_norm(x, residual, weight, eps)
    return F.rms_norm(residual.add_(x), weight.shape, weight, eps)


def silu_and_mul(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """Return `silu(gate) × up`, [tokens, width], of `gate_up`, [tokens, 2 × width]."""
    width = gate_up.shape[-1] // 2
    if choose_backend(backend, gate_up) == "triton":
        out = torch.empty(len(gate_up), width, dtype=gate_up.dtype, device=gate_up.device)
        if len(gate_up):
            silu_and_mul_kernel[(len(gate_up), triton.cdiv(width, CHUNK))](out, gate_up, WIDTH=width, CHUNK=CHUNK)
        return out
    if has_numba() and _cpu().can_run(width, gate_up):
        return _cpu().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate_heads(
    heads: Tensor, positions: Tensor, table: Tensor, num_heads: int | None = None, *, backend: str | None = None
) -> None:
    """Rotate `heads` [tokens, heads, head_dim] in place, by integer `positions` [tokens] and
    `table` [positions, head_dim].

    `(a, b) -> (a cos - b sin, b cos + a sin)`, where a and b are the halves of a head. The heads of
    a token are contiguous; there may be gaps between tokens. `num_heads` limits the rotation to the
    first heads of each token.
    """
    tokens, heads_of_token, head_dim = heads.shape
    num_heads = heads_of_token if num_heads is None else num_heads
    if choose_backend(backend, heads) == "triton":
        if tokens:
            padded_half = triton.next_power_of_2(head_dim // 2)
            rotate_heads_kernel[(tokens, num_heads)](
                heads, positions, table, heads.stride(0), HEAD_DIM=head_dim, PADDED_HALF=padded_half
            )
        return
    if has_numba() and _cpu().can_rotate(heads, table):
        _cpu().rotate_heads(heads, positions.to(torch.int64).contiguous(), table, num_heads)
        return
    heads = heads[:, :num_heads]  # [tokens, num_heads, head_dim]
    cos, sin = table[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads.copy_(turned)


def _cpu() -> Any:
    return loops("elementwise_calls")
