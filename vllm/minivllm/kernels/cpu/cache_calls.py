"""Writing the paged KV cache on a CPU: the choice between two implementations, and how they are called.

As they are, and to int8: compiled loops (`cache_loops.py`) if numba is installed. Everything else: torch's calls.
Measured on one core (AMD Zen 3, torch 2.15), µs, keys and values of the embedded model's 2 heads of 32:

    tokens                          1      128    2,048
    as they are, the loops          5       23      364
    as they are, torch             12       28      300
    to int8, the loops              5       34      540
    to int8, torch                209      288    1,480

So the loops pay where few requests decode, which is where a layer's calls count; in a prompt of 2,048 tokens they cost
64 µs a layer.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from minivllm.kernels.cpu.cells import CacheCells
from minivllm.platforms.threads import has_numba, run_programs

FP8_LARGEST = 448.0
ELEMENTS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}
"""As large as the elements of the caches that the compiled loops copy to."""


def write_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """As `reshape_and_cache`, with arguments that have passed its checks.

    Raises:
        IndexError: a slot is not in the caches. What other tokens have written stays.
    """
    slots = slot_mapping.long().contiguous()
    tokens = slots.shape[0]
    if key.shape[0] > tokens:
        key, value = key[:tokens], value[:tokens]
    arguments = (key, value, key_cache, value_cache, slots, key_scales, value_scales)
    if has_numba() and (key_scales is not None or key_cache.dtype is key.dtype in ELEMENTS):
        numba_write(*arguments)
    else:
        torch_write(*arguments)


def numba_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """The compiled loops of `cache_loops.py`; slots int64."""
    loops = _loops()
    if key_scales is None:
        programs = loops.copies_of(ELEMENTS[key.dtype])
    else:
        key, value, programs = key.float(), value.float(), loops.quantizations()
    tokens, kv_heads, head_dim = key.shape
    num_blocks, block_size = key_cache.shape[:2]
    cells = CacheCells(
        slots=num_blocks * block_size,
        tokens=tokens,
        slots_per_block=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        block_stride=key_cache.stride(0),
        slot_mapping=slots.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        key_scales=0 if key_scales is None else key_scales.data_ptr(),
        value_scales=0 if value_scales is None else value_scales.data_ptr(),
    )
    run_programs(programs, cells, most_threads=-(-tokens // loops.TOKENS))
    if cells.beyond:
        raise IndexError(f"slot {cells.beyond} is not in the cache, which has {cells.slots}")


def torch_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """The same with torch operations, for every dtype."""
    if slots.shape[0] and int(slots.min()) < 0:
        real = slots >= 0
        key, value, slots = key[real], value[real], slots[real]
    for source, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        block_size = cache.shape[1]
        if scales is not None:
            source, scales[slots // block_size, :, slots % block_size] = quantize(source)
        elif cache.dtype != source.dtype:
            source = source.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)  # on a CPU torch can scatter bytes, but not float8
        if cache.is_contiguous():
            cache.flatten(0, 1).index_copy_(0, slots, source)
        else:
            cache[slots // block_size, slots % block_size] = source


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., n]` as int8 from −127 to 127, and the fp32 scale `[...]` of each, largest / 127."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    # Not 127.0 / largest: torch computes that as a reciprocal times 127, rounding twice, which flips some ties.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return torch.floor(rows * inverse + 0.5).to(torch.int8), (largest / 127.0).squeeze(-1)


@functools.cache
def _loops() -> Any:
    """Imports numba only when needed, since that takes a second."""
    from minivllm.kernels.cpu import cache_loops

    return cache_loops
