"""What the launches of both attention kernels share: `unified_attention.py` and `mla_attention.py`."""

from __future__ import annotations

import torch

from minivllm.kernels.attention_configurations import automatic_splits, multiprocessors
from minivllm.platforms.triton_utils import INTERPRETED, tl, triton

TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def padded(head_dim: int) -> int:
    """The head dim as padded by the kernel: the matrix units take powers of two from 16 on."""
    return max(16, triton.next_power_of_2(head_dim))


def dot_type(q: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """The input type of the matrix products: the queries' own, but fp16 where bf16 meets an fp8 cache.

    An e4m3 becomes fp16 in one instruction, and exactly, but bf16 in several, which took a decode of 64 × 4,096 tokens
    from 167 to 242 µs on an H200. Queries, rotated or normed, are far below fp16's 65,504.
    """
    if INTERPRETED:
        return tl.float32  # the interpreter's NumPy has no bf16
    return tl.float16 if (q, cache) == (torch.bfloat16, torch.float8_e4m3fn) else TRITON_TYPES[q]


def offset_type(cache: torch.Tensor) -> tl.dtype:
    """The type in which places in the cache are computed."""
    return tl.int32 if cache.shape[0] * cache.stride(0) < 2**31 else tl.int64


def splits_for(programs: int, keys: int, device: torch.device, per_multiprocessor: int = 1) -> int:
    """Choose how many programs share a sequence's keys: about `per_multiprocessor` on each, see `automatic_splits`."""
    return 1 if INTERPRETED else automatic_splits(programs, keys, per_multiprocessor * multiprocessors(device))


def partials_for(
    q: torch.Tensor, out: torch.Tensor, num_splits: int, padded_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What splits write, (sums, peaks and totals): fp32 [tokens, heads, splits, padded_dim] and [..., 2].

    Without splits it is `out` twice, which is not read.
    """
    if num_splits == 1:
        return out, out
    tokens, heads = q.shape[:2]
    sums = torch.empty(tokens, heads, num_splits, padded_dim, dtype=torch.float32, device=q.device)
    return sums, torch.empty(tokens, heads, num_splits, 2, dtype=torch.float32, device=q.device)
