"""Writing the paged KV cache on a CPU: the choice between two implementations, and how they are
called.

As they are, and to int8: compiled loops (`cache_loops.py`) if numba is installed. Everything else:
torch's calls. Measured on one core (AMD EPYC, torch 2.15), µs of processor time, keys and values of
the embedded model's 2 heads of 32:

    tokens                          1      128      512
    as they are, the loops          7       19       61
    as they are, torch             13       39       95

To int8 torch makes several passes, and takes some ten times as long as the loops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.kernels.cpu.cells import CacheCells
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.platforms.threads import has_numba, run_programs

FP8_LARGEST = 448.0
# Dtypes of caches that the compiled loops copy to.
COPIED = (torch.float32, torch.bfloat16, torch.float16)


class CacheWrite(NamedTuple):
    """Keys and values `[tokens, kv_heads, head_dim]`, and where they go; see
    `reshape_and_cache.py`.
    """

    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


def write_cpu(write: CacheWrite) -> None:
    """Implement `reshape_and_cache`, which has checked the arguments.

    Raises:
        IndexError: a slot is not in the caches. What other tokens have written stays.
    """
    write = write._replace(slots=write.slots.long().contiguous())
    tokens = write.slots.shape[0]
    if write.key.shape[0] > tokens:
        write = write._replace(key=write.key[:tokens], value=write.value[:tokens])
    if can_run(write):
        numba_write(write)
    else:
        torch_write(write)


def numba_write(write: CacheWrite) -> None:
    """Run the compiled loops of `cache_loops.py`, which `can_run` must allow; slots are int64."""
    key, value, key_cache, value_cache, slots, key_scales, value_scales = write
    if key_scales is not None:
        key, value = key.float(), value.float()
    num_blocks, block_size, kv_heads, head_dim = key_cache.shape
    block_stride, slot_stride, head_stride, _ = key_cache.stride()
    cells = CacheCells(
        tokens=len(slots),
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        slots_per_block=block_size,
        key_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_stride=value.stride(0),
        value_head_stride=value.stride(1),
        block_stride=block_stride,
        slot_stride=slot_stride,
        head_stride=head_stride,
        slots=slots.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        key_scales=0 if key_scales is None else key_scales.data_ptr(),
        value_scales=0 if value_scales is None else value_scales.data_ptr(),
    )
    cache_loops = loops("cache_loops")
    programs = cache_loops.copies_of(ELEMENTS[key.dtype]) if key_scales is None else cache_loops.quantizer()
    run_programs(programs, cells, most_threads=1)
    if cells.beyond:
        raise IndexError(f"slot {cells.beyond} is not in the cache, which has {num_blocks * block_size}")


def can_run(write: CacheWrite) -> bool:
    """Return whether the compiled loops support these tensors: heads in one piece, and caches laid
    out alike.
    """
    key, value, key_cache, value_cache, _, key_scales, value_scales = write
    if not has_numba() or key_cache.stride() != value_cache.stride():
        return False
    in_one_piece = key.stride(2) == value.stride(2) == key_cache.stride(3) == 1
    if key_scales is None or value_scales is None:
        return in_one_piece and key_cache.dtype is key.dtype in COPIED
    return in_one_piece and key_scales.is_contiguous() and value_scales.is_contiguous()


def torch_write(write: CacheWrite) -> None:
    """Write with torch operations, for every dtype."""
    key, value, key_cache, value_cache, slots, key_scales, value_scales = write
    if slots.shape[0] and int(slots.min()) < 0:
        real = slots >= 0  # the others are padding
        key, value, slots = key[real], value[real], slots[real]
    for source, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        block_size = cache.shape[1]
        if scales is not None:
            source, scales[slots // block_size, :, slots % block_size] = quantize(source)
        elif cache.dtype != source.dtype:
            source = source.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)  # on a CPU torch can scatter bytes, but not float8
        cache[slots // block_size, slots % block_size] = source


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows `[..., n]` to int8 from −127 to 127; return them and the fp32 scale `[...]`
    of each, largest / 127.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    # Not 127.0 / largest: torch computes that as a reciprocal times 127, rounding twice, which
    # flips some ties.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return torch.floor(rows * inverse + 0.5).to(torch.int8), (largest / 127.0).squeeze(-1)
