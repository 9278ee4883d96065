"""Writing the paged KV cache on a CPU: the choice between two implementations, and how they are called.

As they are, and to int8: compiled loops (`cache_loops.py`) if numba is installed. Everything else: torch's calls.
Measured on one core (AMD EPYC, torch 2.15), µs of processor time, keys and values of the embedded model's 2 heads of 32:

    tokens                          1      128      512
    as they are, the loops          7       19       61
    as they are, torch             13       39       95

To int8 torch makes several passes, and takes some ten times as long as the loops.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from minivllm.platforms.threads import has_numba

FP8_LARGEST = 448.0
COPIED = (torch.float32, torch.bfloat16, torch.float16)
"""Of caches that the compiled loops copy to."""


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
    if has_numba() and (key_scales is not None or key_cache.dtype is key.dtype in COPIED):
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
    if key_scales is None or value_scales is None:
        tensors = (key, value, key_cache, value_cache)
        if key.dtype is not torch.float32:  # NumPy has no bfloat16
            tensors = [tensor.view(torch.int16) for tensor in tensors]
        beyond = loops.copy_tokens(slots.numpy(), *(tensor.numpy() for tensor in tensors))
    else:
        caches = key_cache.numpy(), value_cache.numpy(), key_scales.numpy(), value_scales.numpy()
        beyond = loops.quantize_tokens(slots.numpy(), key.float().numpy(), value.float().numpy(), *caches)
    if beyond:
        raise IndexError(f"slot {beyond} is not in the cache, which has {key_cache.shape[0] * key_cache.shape[1]}")


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
