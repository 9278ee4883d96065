"""Writing the paged KV cache on a CPU: which of two forms runs, and how it is called.

Compiled loops (`cache_loops.py`) where numba is installed, else torch's `index_copy_`. Measured on one core (AMD Zen 4,
torch 2.15), µs, keys and values of the embedded model's 2 heads of 32:

    tokens                          1      128    2,048
    as they are, the loops         14       16      106
    as they are, index_copy_       19       30      270
    to int8, the loops             16       45      542
    to int8, torch                132      178      862
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from minivllm.platforms.threads import has_numba, run_programs

FP8_LARGEST = 448.0


def write_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """As `cache.reshape_and_cache`, whose checks these arguments have passed."""
    slots = slot_mapping.long()
    if len(key) > len(slots):
        key, value = key[: len(slots)], value[: len(slots)]
    words, odd = divmod(key.shape[2] * key.element_size(), 4)
    if has_numba() and key_scales is not None and value_scales is not None:
        arguments = (key.float(), value.float(), key_cache, value_cache, slots)
        _run(*arguments, key.shape[2], key_scales, value_scales)
    elif has_numba() and key_cache.dtype == key.dtype and not odd:
        _run(key, value, key_cache, value_cache, slots, words)
    else:
        torch_write(key, value, key_cache, value_cache, slots, key_scales, value_scales)


def _run(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    head_dim: int,
    *scales: torch.Tensor,
) -> None:
    """Call the compiled programs on their block; `head_dim` in the numbers that they count in, and strides too."""
    loops = _loops()
    tokens, kv_heads, elements = key.shape
    strides = (tensor.stride(0) * head_dim // elements for tensor in (key, value, key_cache))
    addresses = [tensor.data_ptr() for tensor in (slots.contiguous(), key, value, key_cache, value_cache, *scales)]
    addresses += [0] * (2 - len(scales))
    numbers = (tokens, key_cache.shape[1], kv_heads, head_dim, *strides, *addresses)
    run_programs(loops.programs(), numbers, most_threads=-(-tokens // loops.TOKENS))


def torch_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """The same in torch's calls, for every type that there is."""
    if len(slots) and int(slots.min()) < 0:
        real = slots >= 0
        key, value, slots = key[real], value[real], slots[real]
    for source, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        block_size = cache.shape[1]
        if scales is not None:
            source, scales[slots // block_size, :, slots % block_size] = quantize(source)
        elif cache.dtype != source.dtype:
            source = source.float().clamp(-FP8_LARGEST, FP8_LARGEST).to(cache.dtype).view(torch.uint8)
            cache = cache.view(torch.uint8)  # torch moves bytes about on a CPU, not float8
        if cache.is_contiguous():
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, source)
        else:
            cache[slots // block_size, slots % block_size] = source


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., n]` as int8 from −127 to 127, and the fp32 scale `[...]` of each, largest / 127."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    # Not 127.0 / largest: torch makes a reciprocal of that, rounds twice, and halves fall to the other side.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127.0) / largest, 0.0)
    return torch.floor(rows * inverse + 0.5).to(torch.int8), (largest / 127.0).squeeze(-1)


@functools.cache
def _loops() -> Any:
    """numba takes a second to import, so only who needs it does."""
    from minivllm.kernels.cpu import cache_loops

    return cache_loops
