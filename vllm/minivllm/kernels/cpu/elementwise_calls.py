"""Calls of the compiled passes in `elementwise_loops.py`, on at most as many threads as there are programs."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from minivllm.kernels.cpu import elementwise_loops
from minivllm.kernels.cpu.cells import GateCells, NormCells, RotationCells
from minivllm.kernels.cpu.elementwise_loops import TOKENS
from minivllm.kernels.cpu.lanes import WIDTH
from minivllm.platforms.threads import run_programs

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def can_run(width: int, *tensors: torch.Tensor) -> bool:
    """Whether the loops support these tensors: contiguous, of one dtype, row length a multiple of `width`."""
    dtypes = {tensor.dtype for tensor in tensors}
    alike = len(dtypes) == 1 and dtypes <= ELEMENTS.keys()
    return alike and width % WIDTH == 0 and all(map(torch.Tensor.is_contiguous, tensors))


def can_rotate(heads: torch.Tensor, table: torch.Tensor) -> bool:
    """Whether the loops support these heads and this table: as `can_run`, but with gaps between tokens."""
    _, head_stride, stride = heads.stride()
    head_dim = heads.shape[2]
    side_by_side = stride == 1 and head_stride == head_dim
    return side_by_side and heads.dtype is table.dtype and can_run(head_dim // 2, table)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `elementwise.add_rms_norm`."""
    (tokens, width), out, number = x.shape, torch.empty_like(x), array("f", [eps])
    cells = NormCells(
        tokens=tokens,
        width=width,
        out=out.data_ptr(),
        residual=residual.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        eps=number.buffer_info()[0],
    )
    run_programs(elementwise_loops.norms_of(ELEMENTS[x.dtype]), cells, most_threads=-(-tokens // TOKENS))
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `elementwise.silu_and_mul`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype)
    cells = GateCells(tokens=tokens, width=width, out=out.data_ptr(), gate_up=gate_up.data_ptr())
    run_programs(elementwise_loops.gates_of(ELEMENTS[out.dtype]), cells, most_threads=-(-tokens // TOKENS))
    return out


def rotate_heads(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, num_heads: int) -> None:
    """As `elementwise.rotate_heads`; positions int64."""
    tokens, _, head_dim = heads.shape
    cells = RotationCells(
        tokens=tokens,
        num_heads=num_heads,
        head_dim=head_dim,
        token_stride=heads.stride(0),
        heads=heads.data_ptr(),
        table=table.data_ptr(),
        positions=positions.data_ptr(),
    )
    run_programs(elementwise_loops.rotations_of(ELEMENTS[heads.dtype]), cells, most_threads=-(-tokens // TOKENS))
