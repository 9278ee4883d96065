"""Adapters' products on a CPU: the choice between two implementations, and how they are called.

Compiled loops (`lora_loops.py`) where numba is installed and the shapes fit its lanes; otherwise two small matrix
products for each adapter and slice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from minivllm.kernels.cpu.cells import LoRALinearCells
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.platforms.threads import has_numba, run_programs

LANES = 16
ELEMENTS = {torch.float32: "float32", torch.bfloat16: "uint16"}


def lora_linear_cpu(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    bounds: torch.Tensor,
    meta: LoRAKernelMeta,
    edges: Sequence[int],
) -> None:
    """As `lora_linear`; `edges` are `bounds` on the host."""
    if x.dtype is y.dtype is a.dtype and has_loops(a, b, edges):
        CompiledLoRALinear(a, b, ranks, bounds)(y, x, meta)
    else:
        looped_lora_linear(y, x, a, b, ranks, meta, edges)


def has_loops(a: torch.Tensor, b: torch.Tensor, edges: Sequence[int]) -> bool:
    """Whether the compiled loops support these adapters: fp32 or bf16, and widths that are multiples of 16."""
    in_lanes = a.shape[2] % 4 == 0 and all(number % LANES == 0 for number in (a.shape[3], *edges))
    return in_lanes and a.dtype in ELEMENTS and b.dtype is a.dtype and has_numba()


class CompiledLoRALinear:
    """The compiled loops for one linear, whose addresses are looked up once: a call takes microseconds."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, ranks: torch.Tensor, bounds: torch.Tensor) -> None:
        self._tensors = a, b, ranks, bounds  # which the addresses are of
        slices, slots, max_rank, width = a.shape
        self.dtype = a.dtype
        self._of_linear = (slices, slots, max_rank, width, b.shape[2], *(one.data_ptr() for one in self._tensors))
        self._programs = _programs(a.dtype)

    def __call__(self, y: torch.Tensor, x: torch.Tensor, meta: LoRAKernelMeta) -> None:
        """As `lora_linear`; x and y of the adapters' dtype, a row of x contiguous."""
        num_tiles, indices, table = meta.cpu_tiles
        of_step = (num_tiles, x.stride(0), y.data_ptr(), x.data_ptr(), indices, table)
        run_programs(self._programs, LoRALinearCells(0, *of_step, *self._of_linear), most_threads=num_tiles)


def looped_lora_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    meta: LoRAKernelMeta,
    edges: Sequence[int],
) -> None:
    """For any shapes and dtypes: adapter by adapter, slice by slice."""
    for number in range(meta.num_active):
        slot, start = int(meta.active[number]), int(meta.starts[number])
        rows = meta.indices[start : start + int(meta.counts[number])].long()
        inputs = x[rows].to(a.dtype)
        for piece, (first, last) in enumerate(pairwise(edges)):
            rank = int(ranks[piece, slot])
            if rank:
                shrunk = inputs @ a[piece, slot, :rank].T
                y[rows, first:last] += (shrunk @ b[slot, :rank, first:last]).to(y.dtype)


@functools.cache
def _programs(dtype: torch.dtype) -> Any:
    """Imports numba only when needed, since that takes a second."""
    import numpy as np

    from minivllm.kernels.cpu.lora_loops import programs_for

    return programs_for(getattr(np, ELEMENTS[dtype]))
