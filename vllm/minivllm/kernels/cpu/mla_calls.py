"""The latent cache on a CPU: writing it, and the absorbed form of attention over it.

The attention loops of ordinary heads serve here too: the cache as one KV head, its rows as keys and
as values. That sums the rotated parts up with the values, for nothing: rope_dim / width of half the
work. For widths that the loops do not support (they take multiples of 16), and without numba, torch
gathers each sequence's rows and multiplies. Medians of 22 calls in turns on one core of a busy
machine (AMD EPYC, torch 2.15), µs:

    fp32, decodes × keys                     loops     torch
    8 heads, 56 + 8 numbers, 16 × 512          360     1,302
    8 heads, 56 + 8 numbers, 1 × 2,048         100       194
    16 heads, 512 + 64 numbers, 8 × 512      9,909    16,156
    16 heads, 512 + 64 numbers, 1 × 4,096    9,637    23,236
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.attention_arguments import AttentionArguments, MLAArguments
from minivllm.kernels.cpu.attention_calls import CACHES, numba_attention
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
    if q.shape[2] % 16 == 0 and cache.dtype in CACHES and has_numba():
        one_head = cache.unsqueeze(2)  # [blocks, block_size, 1, width]
        sums = torch.empty(q.shape, dtype=q.dtype)
        numba_attention(sums, AttentionArguments(q, one_head, one_head, *tables, scale))
        tokens = int(arguments.query_start_loc[-1])
        out[:tokens] = sums[:tokens, :, :rank]
    else:
        gather_latent_attention(out, arguments)


def gather_latent_attention(out: Tensor, arguments: MLAArguments) -> None:
    """Write each sequence's attention output with torch, one sequence at a time."""
    q, cache, query_start_loc, seq_lens, block_table, scale, rank = arguments
    starts = query_start_loc.tolist()
    block_size = cache.shape[1]
    for sequence, length in enumerate(seq_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        blocks = block_table[sequence, : -(-length // block_size)]
        rows = cache[blocks].flatten(0, 1)[:length].float()
        scores = q[begin:end].float() @ rows.t() * scale  # [queries, heads, keys]
        if end - begin > 1:
            seen = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
            scores.masked_fill_(~seen.unsqueeze(1), float("-inf"))
        out[begin:end] = torch.softmax(scores, dim=-1) @ rows[:, :rank]
