"""The latent cache on a CPU: writing it, and the absorbed form of attention over it.

The attention of ordinary heads serves here too: the cache as one KV head, its rows as keys and as
values. The loops sum the rotated parts up with the values, for nothing: rope_dim / width of half
the work. They take widths that are multiples of 16; for others, torch gathers each sequence's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.attention_arguments import AttentionArguments, MLAArguments
from minivllm.kernels.cpu.attention_calls import CACHES, numba_attention
from minivllm.kernels.cpu.attention_gather import gather_attention
from minivllm.platforms.threads import has_numba


def write_latents_cpu(latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write latents as `concat_and_cache_mla` does, which has checked the arguments."""
    slots = slot_mapping.long()
    rows = torch.cat((latent, k_rope), dim=1)
    if slots.shape[0] and int(slots.min()) < 0:
        real = slots >= 0
        slots, rows = slots[real], rows[real]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows


def mla_attention_cpu(out: Tensor, arguments: MLAArguments) -> None:
    """Write each sequence's attention output to its rows of `out`."""
    q, cache, *tables, scale, rank = arguments
    keys = cache.unsqueeze(2)  # [blocks, block_size, 1, width]
    if q.shape[2] % 16 == 0 and cache.dtype in CACHES and has_numba():
        sums = torch.empty(q.shape, dtype=q.dtype)
        numba_attention(sums, AttentionArguments(q, keys, keys, *tables, scale))
        tokens = int(arguments.query_start_loc[-1])
        out[:tokens] = sums[:tokens, :, :rank]
    else:
        gather_attention(out, AttentionArguments(q, keys, keys[..., :rank], *tables, scale))
