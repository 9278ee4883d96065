"""The launch code that both attention kernels share: `unified_attention.py` and `mla_attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.attention_configurations import automatic_splits, multiprocessors
from minivllm.platforms.triton_utils import INTERPRETED, tl, triton

TRITON_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def padded(head_dim: int) -> int:
    """Return the head dim that the kernel works with: the matrix units take powers of two, at
    least 16.
    """
    return max(16, triton.next_power_of_2(head_dim))


def dot_type(q: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """Return the input type of the matrix products: the queries' own, or fp16 for bf16 queries over
    an fp8 cache.

    Converting e4m3 to fp16 takes one instruction and is exact; to bf16 it takes several, which
    slowed a decode of 64 × 4,096 tokens from 167 to 242 µs on an H200. Queries, rotated or normed,
    are far below fp16's 65,504.
    """
    if INTERPRETED:
        return tl.float32  # the interpreter's NumPy has no bf16
    return tl.float16 if (q, cache) == (torch.bfloat16, torch.float8_e4m3fn) else TRITON_TYPES[q]


def offset_type(cache: Tensor) -> tl.dtype:
    """Return the type in which offsets into the cache are computed: 64 bits where 32 would
    overflow.
    """
    return tl.int32 if cache.shape[0] * cache.stride(0) < 2**31 else tl.int64


def splits_for(programs: int, keys: int, device: torch.device, per_multiprocessor: int = 1) -> int:
    """Choose how many programs share a sequence's keys, for about `per_multiprocessor` programs on
    each multiprocessor (see `automatic_splits`).
    """
    return 1 if INTERPRETED else automatic_splits(programs, keys, per_multiprocessor * multiprocessors(device))


def partials_for(q: Tensor, out: Tensor, num_splits: int, padded_dim: int) -> tuple[Tensor, Tensor]:
    """Allocate the splits' partial results, (sums, peaks and totals): fp32 [tokens, heads, splits,
    padded_dim] and [..., 2].

    Without splits, return `out` twice, as placeholders that the kernel does not use.
    """
    if num_splits == 1:
        return out, out
    sums = q.new_empty(*q.shape[:2], num_splits, padded_dim, dtype=torch.float32)
    return sums, q.new_empty(*q.shape[:2], num_splits, 2, dtype=torch.float32)
