"""Blocks of the paged cache to a staging buffer and back on a CPU: the choice between two implementations.

Compiled loops around `memcpy` (`block_copy_loops.py`) if numba is installed, else torch's `index_select` and
`index_copy_`. Both on the calling thread only: a copy on one core takes all the bandwidth that a plain copy on it has,
and the calling thread is often one that works beside the forward pass, whose threads it must not take. Both let other
Python threads run. Measured on one core (AMD EPYC, torch 2.11), GB/s, 8 regions:

    blocks                        64 of 4 KiB    64 of 64 KiB    8 of 64 KiB
    a plain copy                           39              12             46
    gather or scatter, loops               42              11             44
    gather, torch                          28               9             33
    scatter, torch                          7               3              7
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from minivllm.kernels.cpu.cells import BlockCopyCells
from minivllm.platforms.threads import has_numba, run_programs


def copy_regions_cpu(
    tensors: Sequence[torch.Tensor],
    table: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    slots: torch.Tensor | None,
    capacity: int,
    gather: bool,
    block_major: bool,
) -> None:
    """As `copy_blocks.gather_blocks` or `scatter_blocks`, with arguments that have passed their checks."""
    blocks = blocks.long().contiguous()
    slots = torch.arange(len(blocks)) if slots is None else slots.long().contiguous()
    if has_numba():
        numba_copy(table, blocks, staging, slots, capacity, gather, block_major)
    else:
        torch_copy(tensors, blocks, staging, slots, capacity, gather, block_major)


def numba_copy(
    table: torch.Tensor,
    blocks: torch.Tensor,
    staging: torch.Tensor,
    slots: torch.Tensor,
    capacity: int,
    gather: bool,
    block_major: bool,
) -> None:
    """The compiled loops of `block_copy_loops.py`; ids int64 and contiguous."""
    cells = BlockCopyCells(
        blocks=len(blocks),
        regions=len(table),
        capacity=capacity,
        gather=int(gather),
        block_major=int(block_major),
        table=table.data_ptr(),
        block_ids=blocks.data_ptr(),
        slots=slots.data_ptr(),
        staging=staging.data_ptr(),
    )
    run_programs(_loops().programs(), cells, most_threads=1)


def torch_copy(
    tensors: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    staging: torch.Tensor,
    slots: torch.Tensor,
    capacity: int,
    gather: bool,
    block_major: bool,
) -> None:
    """The same with torch operations."""
    regions = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]
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


@functools.cache
def _loops() -> Any:
    """Imports numba only when needed, since that takes a second."""
    from minivllm.kernels.cpu import block_copy_loops

    return block_copy_loops
