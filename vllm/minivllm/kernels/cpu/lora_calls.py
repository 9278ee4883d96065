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
    same_dtype = x.dtype in ELEMENTS and x.dtype is y.dtype is a.dtype is b.dtype
    in_lanes = a.shape[2] % 4 == 0 and all(number % LANES == 0 for number in (x.shape[1], *edges))
    if same_dtype and in_lanes and has_numba():
        numba_lora_linear(y, x, a, b, ranks, bounds, meta)
    else:
        looped_lora_linear(y, x, a, b, ranks, meta, edges)


def numba_lora_linear(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    bounds: torch.Tensor,
    meta: LoRAKernelMeta,
) -> None:
    """The compiled loops: x, y, a and b of one dtype, fp32 or bf16; widths that are multiples of 16."""
    slices, slots, max_rank, width = a.shape
    num_tiles = meta.tiles.shape[1]
    cells = LoRALinearCells(
        tiles=num_tiles,
        slices=slices,
        slots=slots,
        max_rank=max_rank,
        width=width,
        outputs=y.shape[1],
        x_stride=x.stride(0),
        y=y.data_ptr(),
        x=x.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        ranks=ranks.data_ptr(),
        bounds=bounds.data_ptr(),
        indices=meta.indices.data_ptr(),
        tile_table=meta.tiles.ctypes.data,
    )
    run_programs(_programs(x.dtype), cells, most_threads=num_tiles)


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
