"""Copying blocks of the paged cache, in all layers at once, into one contiguous staging buffer and
back.

    gather_blocks     staging ← cache     before blocks are sent to another engine (lesson 08) or to host memory (lesson 11)
    scatter_blocks    cache ← staging     after they have arrived

A *region* is one tensor of the cache: a layer's keys, its values, or the scales of either where the
cache is int8. All have the pool's blocks as their first dimension, so one block id names a piece of
every region. Bytes are copied unchanged, whatever the dtype.

Layouts
    regions    [blocks, ...], any dtype; each block contiguous, any stride between blocks (K and V may be interleaved)
    table      int64 [regions, 4]: address, bytes from block to block, bytes of a block, bytes of it in the regions before
    blocks     int32 or int64 [n]: blocks of the cache; a block may be gathered twice, but not scattered to twice
    slots      int32 or int64 [n], distinct, or None for 0 … n − 1: where each block is in the staging buffer
    staging    uint8 [capacity × record], contiguous; a *record* is a block's bytes in all regions, one region after
               another, so a block is one contiguous copy

Grid: a program for each (block, region, 16 KiB of the largest region). Programs of small regions,
such as scales, beyond their last byte do nothing. One launch for all layers: a launch for each of
32 layers' K and V would cost 64 × ~5 µs before the first byte.

Must move: every byte read once and written once, 2 × n × record; the table and the ids add 32 + 16
bytes a program of 16 KiB. A thread moves 16 bytes at a time where all addresses and sizes are
multiples of 16, as they are in every common model; else 4, 2 or 1.

In vLLM v0.33.0: `vllm/v1/kv_offload/cpu/gpu_worker.py`,
`vllm/v1/kv_offload/cpu/swap_blocks_triton.py` (`swap_blocks_batch`) and `csrc/cache_kernels.cu`
copy a list of pieces; NIXL's own backend reads the pieces in place.

The CPU twin is in `cpu/block_copy_loops.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.cells import BlockCopyCells
from minivllm.kernels.cpu.loops import loops
from minivllm.platforms.threads import run_programs
from minivllm.platforms.triton_utils import tl, triton

CHUNK_BYTES = 16384


@dataclass(frozen=True, eq=False)
class BlockRegions:
    """The tensors of a paged cache, as the copy kernels see them: a table of addresses, built once
    per cache.

    - `tensors`: the regions, each [blocks, ...]; kept, so that the addresses stay valid.
    - `table`: int64 [regions, 4] on their device, as described above.
    - `block_bytes`: bytes of a block in each region. `unit`: the largest divisor of 16
      that also divides all addresses and sizes.
    """

    tensors: tuple[Tensor, ...]
    table: Tensor
    block_bytes: tuple[int, ...]
    unit: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> BlockRegions:
        """Describe these tensors as regions, in this order; a tensor may occur twice."""
        sizes = tuple(tensor[0].numel() * tensor.element_size() for tensor in tensors)
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        rows = [
            (tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), size, offset)
            for tensor, size, offset in zip(tensors, sizes, offsets, strict=True)
        ]
        # Threads move as many bytes at a time as all addresses and sizes allow.
        unit = math.gcd(16, *(number for row in rows for number in row))
        table = torch.tensor(rows, dtype=torch.int64, device=tensors[0].device)
        return cls(tuple(tensors), table, sizes, unit)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of one block in all regions."""
        return sum(self.block_bytes)

    @property
    def device(self) -> torch.device:
        """Return the device of the cache."""
        return self.tensors[0].device


@triton.jit
def copy_regions_kernel(
    table,
    blocks,
    slots,
    staging,
    record,
    GATHER: tl.constexpr,
    WORD: tl.constexpr,  # the integer that is moved
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,  # bytes that all addresses and sizes are multiples of
    CHUNK: tl.constexpr,  # words per program
):
    """Grid (blocks, regions, chunks of the largest region)."""
    number = tl.program_id(0)
    region = table + 4 * tl.program_id(1)  # a row of the table
    address, stride, size, offset = tl.load(region), tl.load(region + 1), tl.load(region + 2), tl.load(region + 3)
    words = tl.multiple_of((size // WORD_BYTES).to(tl.int32), UNIT // WORD_BYTES)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    slot = number.to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + number).to(tl.int64)
    cell = (address + tl.load(blocks + number).to(tl.int64) * stride).to(tl.pointer_type(WORD))
    staged = (staging + slot * record + offset).to(tl.pointer_type(WORD))
    # Told what all addresses are multiples of, the compiler moves 16 bytes at a time where that is
    # possible.
    cells = tl.multiple_of(cell, UNIT) + word
    staged_words = tl.multiple_of(staged, UNIT) + word
    mask = word < words
    if GATHER:
        tl.store(staged_words, tl.load(cells, mask=mask), mask=mask)
    else:
        tl.store(cells, tl.load(staged_words, mask=mask), mask=mask)


def _copy(
    regions: BlockRegions,
    blocks: Tensor,
    staging: Tensor,
    slots: Tensor | None = None,
    *,
    gather: bool,
    backend: str | None = None,
) -> None:
    """Copy these blocks of all regions into the staging buffer if `gather`, else out of it.

    `blocks` and `slots` are int32 or int64 `[n]` on the cache's device, `staging` uint8 with room
    for whole records. `backend` is "triton" or "cpu"; None follows the device. Nothing is checked: an
    id outside the pool or the buffer reads or writes out of bounds.
    """
    if choose_backend(backend, staging) == "cpu":
        _copy_on_cpu(regions, blocks, staging, slots, gather)
        return
    if not len(blocks):
        return
    unit = math.gcd(regions.unit, staging.data_ptr())  # the buffer's own address counts, too
    word_bytes = min(unit, 4)
    chunks = triton.cdiv(max(regions.block_bytes), CHUNK_BYTES)
    copy_regions_kernel[(len(blocks), len(regions.block_bytes), chunks)](
        regions.table, blocks, slots, staging, regions.record_bytes,
        GATHER=gather,
        WORD={4: tl.int32, 2: tl.int16, 1: tl.int8}[word_bytes],
        WORD_BYTES=word_bytes,
        UNIT=unit,
        CHUNK=CHUNK_BYTES // word_bytes,
    )  # fmt: skip


def _copy_on_cpu(regions: BlockRegions, blocks: Tensor, staging: Tensor, slots: Tensor | None, gather: bool) -> None:
    """Copy on the calling thread only, which lets other Python threads run.

    One core takes all the bandwidth that a plain copy has, and the calling thread often works
    beside the forward pass, whose threads it must not take.
    """
    blocks = blocks.long().contiguous()
    slots = torch.arange(len(blocks)) if slots is None else slots.long().contiguous()
    addresses = (regions.table.data_ptr(), blocks.data_ptr(), slots.data_ptr(), staging.data_ptr())
    cells = BlockCopyCells(0, len(blocks), len(regions.table), regions.record_bytes, gather, *addresses)
    run_programs(loops("block_copy_loops").programs_for(), cells, most_threads=1)


gather_blocks = functools.partial(_copy, gather=True)
scatter_blocks = functools.partial(_copy, gather=False)
