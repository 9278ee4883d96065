"""Attention over paged caches in plain PyTorch: gather each sequence's keys and values, then use
torch's attention.

The CPU fallback if numba is missing or the loops do not support the dtype or head dim, and the
baseline that the loops are measured against. It moves K and V three times (read, write contiguous,
read again); the kernels move them once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.attention_arguments import AttentionArguments


def gather_attention(out: Tensor, arguments: AttentionArguments, naive: bool = False) -> None:
    """Write each sequence's attention output to its rows of `out`.

    naive: materialize the whole score matrix `[heads, queries, keys]`, as was usual before
        FlashAttention.
    """
    q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, window, k_scales, v_scales = arguments
    starts = query_start_loc.tolist()
    block_size = k_cache.shape[1]
    for sequence, length in enumerate(seq_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        blocks = block_table[sequence, : -(-length // block_size)]
        # [kv_heads, keys, head_dim], as torch's attention takes them
        keys = _gathered(k_cache, k_scales, blocks, q.dtype)[:length].transpose(0, 1)
        values = _gathered(v_cache, v_scales, blocks, q.dtype)[:length].transpose(0, 1)
        queries = q[begin:end].transpose(0, 1)
        seen = _seen(end - begin, length, window, q.device)
        if not naive:
            attended = F.scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=seen, scale=scale, enable_gqa=True
            )[0]
        else:
            attended = _matrix_attention(queries, keys, values, seen, scale)
        out[begin:end] = attended.transpose(0, 1)


def _gathered(cache: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the blocks' keys or values `[slots, kv_heads, head_dim]`, converted (or
    dequantized) to `dtype`.
    """
    stored = cache[blocks]
    if scales is not None:
        stored = stored * scales[blocks].transpose(1, 2)[..., None]
    return stored.flatten(0, 1).to(dtype)


def _seen(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of the keys that each query sees, bool `[queries, keys]`, or None if all
    are seen.
    """
    if queries == 1 and (sliding_window is None or sliding_window >= keys):
        return None
    asking = torch.arange(keys - queries, keys, device=device)[:, None]
    asked = torch.arange(keys, device=device)
    seen = asked <= asking
    return seen if sliding_window is None else seen & (asked > asking - sliding_window)


def _matrix_attention(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    group = len(queries) // len(keys)
    keys, values = keys.float().repeat_interleave(group, 0), values.float().repeat_interleave(group, 0)
    scores = queries.float() @ keys.transpose(1, 2) * scale  # [heads, queries, keys]
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ values).to(queries.dtype)
