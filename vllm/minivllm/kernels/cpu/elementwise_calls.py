"""How the compiled passes of `elementwise_loops.py` are called."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import numpy as np
import torch

from minivllm.kernels.cpu import elementwise_loops
from minivllm.kernels.cpu.elementwise_loops import ADD_RMS_NORM, ROTATE_HEADS, SILU_AND_MUL, TOKENS
from minivllm.kernels.cpu.lanes import WIDTH
from minivllm.platforms.threads import run_programs

ELEMENTS = {torch.float32: np.float32, torch.bfloat16: np.uint16}


def can_run(width: int, *tensors: torch.Tensor) -> bool:
    """Whether there are loops for these, whose rows are a multiple of `width`: they get addresses, and go by lanes."""
    dtype = tensors[0].dtype
    return dtype in ELEMENTS and width % WIDTH == 0 and all(t.dtype is dtype and t.is_contiguous() for t in tensors)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `elementwise.add_rms_norm`."""
    out, small = torch.empty_like(x), array("f", [eps])
    addresses = (tensor.data_ptr() for tensor in (out, residual, x, weight))
    _run(ADD_RMS_NORM, x.dtype, *x.shape, *addresses, small.buffer_info()[0])
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `elementwise.silu_and_mul`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype)
    _run(SILU_AND_MUL, out.dtype, *out.shape, out.data_ptr(), gate_up.data_ptr())
    return out


def rotate_heads(heads: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> None:
    """As `elementwise.rotate_heads`."""
    addresses = (tensor.data_ptr() for tensor in (heads, table, positions))
    _run(ROTATE_HEADS, heads.dtype, *heads.shape, heads.stride(0), *addresses)


def _run(operation: int, dtype: torch.dtype, tokens: int, *numbers: int) -> None:
    """Run the operation's programs for so many tokens, on no more threads than there are programs."""
    run_programs(_programs(dtype), (operation, tokens, *numbers), most_threads=-(-tokens // TOKENS))


@functools.cache
def _programs(dtype: torch.dtype) -> Any:
    return elementwise_loops.programs_for(ELEMENTS[dtype])
