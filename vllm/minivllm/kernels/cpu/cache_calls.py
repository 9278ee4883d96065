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

from minivllm.kernels.cpu.loops import loops
from minivllm.platforms.threads import has_numba

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
    if has_numba() and (write.key_scales is not None or write.key_cache.dtype is write.key.dtype in COPIED):
        numba_write(write)
    else:
        torch_write(write)


def numba_write(write: CacheWrite) -> None:
    """Run the compiled loops of `cache_loops.py`; slots are int64."""
    key, value, key_cache, value_cache, slots, key_scales, value_scales = write
    cache_loops = loops("cache_loops")
    if key_scales is None or value_scales is None:
        tensors = (key, value, key_cache, value_cache)
        if key.dtype is not torch.float32:  # NumPy has no bfloat16
            tensors = [tensor.view(torch.int16) for tensor in tensors]
        beyond = cache_loops.copy_tokens(slots.numpy(), *(tensor.numpy() for tensor in tensors))
    else:
        caches = key_cache.numpy(), value_cache.numpy(), key_scales.numpy(), value_scales.numpy()
        beyond = cache_loops.quantize_tokens(slots.numpy(), key.float().numpy(), value.float().numpy(), *caches)
    if beyond:
        raise IndexError(f"slot {beyond} is not in the cache, which has {key_cache.shape[0] * key_cache.shape[1]}")


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
        if cache.is_contiguous():
            cache.flatten(0, 1).index_copy_(0, slots, source)
        else:
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
