"""Blocks of the paged cache to a staging buffer and back on a CPU: the choice between two
implementations.

Compiled loops around `memcpy` (`block_copy_loops.py`) if numba is installed, else torch's
`index_select` and `index_copy_`. Both on the calling thread only: a copy on one core takes all the
bandwidth that a plain copy on it has, and the calling thread is often one that works beside the
forward pass, whose threads it must not take. Both let other Python threads run. Measured on one
core (AMD EPYC, torch 2.11), GB/s, 8 regions:

    blocks                        64 of 4 KiB    64 of 64 KiB    8 of 64 KiB
    a plain copy                           39              12             46
    gather or scatter, loops               42              11             44
    gather, torch                          28               9             33
    scatter, torch                          7               3              7
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.kernels.cpu.cells import BlockCopyCells
from minivllm.kernels.cpu.loops import loops
from minivllm.platforms.threads import has_numba, run_programs


def copy_regions_cpu(
    tensors: Sequence[Tensor],
    table: Tensor,
    blocks: Tensor,
    staging: Tensor,
    slots: Tensor | None,
    capacity: int,
    gather: bool,
    block_major: bool,
) -> None:
    """Implement `copy_blocks.gather_blocks` and `scatter_blocks`, which have checked the
    arguments.
    """
    blocks = blocks.long().contiguous()
    slots = torch.arange(len(blocks)) if slots is None else slots.long().contiguous()
    if not has_numba():
        torch_copy(tensors, blocks, staging, slots, capacity, gather, block_major)
        return
    addresses = (table.data_ptr(), blocks.data_ptr(), slots.data_ptr(), staging.data_ptr())
    cells = BlockCopyCells(0, len(blocks), len(table), capacity, gather, block_major, *addresses)
    run_programs(loops("block_copy_loops").programs_for(), cells, most_threads=1)


def torch_copy(
    tensors: Sequence[Tensor],
    blocks: Tensor,
    staging: Tensor,
    slots: Tensor,
    capacity: int,
    gather: bool,
    block_major: bool,
) -> None:
    """Copy with torch operations; ids are int64."""
    regions = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]  # [blocks, bytes of a block] each
    sizes = [region.shape[1] for region in regions]
    if block_major:
        staged = staging.view(capacity, -1).split(sizes, 1)
    else:
        pieces = staging.split([size * capacity for size in sizes])
        staged = tuple(piece.view(capacity, size) for piece, size in zip(pieces, sizes, strict=True))
    for region, records in zip(regions, staged, strict=True):
        if gather:
            records.index_copy_(0, slots, region.index_select(0, blocks))
        else:
            region.index_copy_(0, blocks, records.index_select(0, slots))
