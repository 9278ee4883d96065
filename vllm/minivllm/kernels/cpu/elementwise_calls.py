"""Calls of the compiled passes in `elementwise_loops.py`, on at most as many threads as there
are programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.cpu import elementwise_loops
from minivllm.kernels.cpu.cells import GateCells, NormCells, RotationCells, bits_of
from minivllm.kernels.cpu.elementwise_loops import TOKENS
from minivllm.kernels.cpu.lanes import WIDTH
from minivllm.kernels.cpu.loops import ELEMENTS
from minivllm.platforms.threads import run_programs

DTYPES = {torch.float32, torch.bfloat16}


def can_run(width: int, *tensors: Tensor) -> bool:
    """Return whether the loops support these tensors: contiguous, of one dtype, with rows of
    `width` numbers.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    alike = len(dtypes) == 1 and dtypes <= DTYPES
    return alike and width % WIDTH == 0 and all(map(Tensor.is_contiguous, tensors))


def can_rotate(heads: Tensor, table: Tensor) -> bool:
    """Return whether the loops support these heads, which may have gaps between tokens, and this
    table.
    """
    head_dim = heads.shape[2]
    side_by_side = heads.stride()[1:] == (head_dim, 1)
    return side_by_side and heads.dtype is table.dtype and can_run(head_dim // 2, table)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `elementwise.add_rms_norm`."""
    tokens, width = x.shape
    out = torch.empty_like(x)
    addresses = (out.data_ptr(), residual.data_ptr(), x.data_ptr(), weight.data_ptr())
    cells = NormCells(0, tokens, width, bits_of(eps), *addresses)
    run_programs(elementwise_loops.norms_of(ELEMENTS[x.dtype]), cells, most_threads=-(-tokens // TOKENS))
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Implement `elementwise.silu_and_mul`."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype)
    cells = GateCells(0, tokens, width, out.data_ptr(), gate_up.data_ptr())
    run_programs(elementwise_loops.gates_of(ELEMENTS[out.dtype]), cells, most_threads=-(-tokens // TOKENS))
    return out


def rotate_heads(heads: Tensor, positions: Tensor, table: Tensor, num_heads: int) -> None:
    """Implement `elementwise.rotate_heads`; positions are int64."""
    tokens, _, head_dim = heads.shape
    addresses = (heads.data_ptr(), table.data_ptr(), positions.data_ptr())
    cells = RotationCells(0, tokens, num_heads, head_dim, heads.stride(0), *addresses)
    run_programs(elementwise_loops.rotations_of(ELEMENTS[heads.dtype]), cells, most_threads=-(-tokens // TOKENS))
