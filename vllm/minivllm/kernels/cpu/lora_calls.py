"""Adapters' matmuls on a CPU: the choice between two implementations, and how they are called.

Compiled loops (`lora_loops.py`) where numba is installed and the shapes fit its lanes; otherwise
two small matrix products for each adapter and slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minivllm.kernels.cpu.cells import LoRALinearCells
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.kernels.lora_metadata import Adapters, LoRAKernelMeta
from minivllm.platforms.threads import has_numba, run_programs

LANES = 16
DTYPES = (torch.float32, torch.bfloat16)


def lora_linear_cpu(y: Tensor, x: Tensor, adapters: Adapters, meta: LoRAKernelMeta) -> None:
    """Implement `lora_linear`, which has checked the arguments."""
    a, b, ranks, bounds, edges = adapters
    if x.dtype is y.dtype is a.dtype and has_loops(a, b, edges):
        CompiledLoRALinear(a, b, ranks, bounds)(y, x, meta)
    else:
        looped_lora_linear(y, x, adapters, meta)


def has_loops(a: Tensor, b: Tensor, edges: Sequence[int]) -> bool:
    """Return whether the compiled loops support these adapters: fp32 or bf16, and widths that
    are multiples of 16.
    """
    in_lanes = a.shape[2] % 4 == 0 and all(number % LANES == 0 for number in (a.shape[3], *edges))
    return in_lanes and a.dtype in DTYPES and b.dtype is a.dtype and has_numba()


class CompiledLoRALinear:
    """The compiled loops for one linear, whose addresses are looked up once: a call takes
    microseconds.
    """

    def __init__(self, a: Tensor, b: Tensor, ranks: Tensor, bounds: Tensor) -> None:
        self._tensors = (a, b, ranks, bounds)  # kept, so that their addresses stay valid
        self.dtype = a.dtype
        self._of_linear = (*a.shape, b.shape[2], *(tensor.data_ptr() for tensor in self._tensors))
        self._programs = loops("lora_loops").programs_for(ELEMENTS[a.dtype])

    def __call__(self, y: Tensor, x: Tensor, meta: LoRAKernelMeta) -> None:
        """Implement `lora_linear` for x and y in the adapters' dtype; each row of x must be
        contiguous.
        """
        num_tiles, indices, table = meta.cpu_tiles
        of_step = (num_tiles, x.stride(0), y.data_ptr(), x.data_ptr(), indices, table)
        run_programs(self._programs, LoRALinearCells(0, *of_step, *self._of_linear), most_threads=num_tiles)


def looped_lora_linear(y: Tensor, x: Tensor, adapters: Adapters, meta: LoRAKernelMeta) -> None:
    """Implement `lora_linear` for any shapes and dtypes: adapter by adapter, slice by slice."""
    a, b, ranks, _, edges = adapters
    for number in range(meta.num_active):
        slot, start = int(meta.active[number]), int(meta.starts[number])
        rows = meta.indices[start : start + int(meta.counts[number])].long()
        inputs = x[rows].to(a.dtype)  # [rows, in]
        for piece, (first, last) in enumerate(pairwise(edges)):
            rank = int(ranks[piece, slot])
            if rank:
                shrunk = inputs @ a[piece, slot, :rank].T  # [rows, rank]
                y[rows, first:last] += (shrunk @ b[slot, :rank, first:last]).to(y.dtype)
