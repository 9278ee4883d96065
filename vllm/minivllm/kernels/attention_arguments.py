"""The arguments of every form of attention (`AttentionArguments`, `MLAArguments`), and the
validation of those that lessons call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.errors import MinivllmError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Dtypes a cache may have besides the model's own.
QUANTIZED = (torch.int8, torch.float8_e4m3fn)


class AttentionArguments(NamedTuple):
    """The arguments of attention over paged K and V; see `unified_attention.py` for the layouts."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    scale: float
    sliding_window: int | None = None
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


class MLAArguments(NamedTuple):
    """The arguments of attention over paged latents; see `mla_attention.py` for the layouts."""

    q: Tensor
    cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    scale: float
    kv_lora_rank: int


def check_arguments(arguments: AttentionArguments) -> None:
    """Raise `MinivllmError` if shapes, types or values are invalid; the message says what is
    expected.
    """
    q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, window, *scales = arguments
    _check_queries_and_caches(q, k_cache, v_cache)
    check_scales(k_cache, *scales)
    check_tables(query_start_loc, seq_lens, block_table)
    if not scale > 0:
        raise MinivllmError(f"scale must be greater than 0, got {scale}")
    if window is not None and window < 1:
        raise MinivllmError(f"sliding_window must be at least 1, got {window}")


def _check_queries_and_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise MinivllmError(
            f"q {tuple(q.shape)} must be [tokens, heads, head_dim] and the cache {tuple(k_cache.shape)} "
            "[blocks, block_size, kv_heads, head_dim], with heads a multiple of kv_heads and the same head_dim"
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise MinivllmError("K and V caches must have the same shape and strides, head_dim contiguous")
    if q.dtype not in DTYPES or k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *QUANTIZED):
        raise MinivllmError(
            f"q is {q.dtype}, the caches {k_cache.dtype} and {v_cache.dtype}: they must have the same dtype, "
            "float32, float16 or bfloat16, unless the caches are int8 or float8_e4m3fn"
        )
    if not 0 < q.shape[2] <= 256:
        raise MinivllmError(f"head_dim must be 1 to 256, got {q.shape[2]}")


def check_tables(query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor) -> None:
    """Raise `MinivllmError` if the tables of a ragged batch have mismatched shapes, or are not
    int32 or not contiguous.
    """
    if query_start_loc.shape != (len(seq_lens) + 1,) or block_table.dim() != 2 or len(block_table) < len(seq_lens):
        raise MinivllmError(
            f"{len(seq_lens)} sequences need query_start_loc [{len(seq_lens) + 1}] and a block_table row each, "
            f"got {tuple(query_start_loc.shape)} and {tuple(block_table.shape)}"
        )
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens), ("block_table", block_table)):
        if tensor.dtype != torch.int32:
            raise MinivllmError(f"{name} must be int32, got {tensor.dtype}")
        if tensor.stride(-1) != 1 and tensor.numel() > 1:
            raise MinivllmError(f"the last dimension of {name} must be contiguous")


def check_scales(cache: Tensor, *scales: Tensor | None) -> None:
    """Reject scales that are missing or do not match the caches `[blocks, block_size, kv_heads,
    head_dim]`.
    """
    blocks, block_size, kv_heads, _ = cache.shape
    shape = (blocks, kv_heads, block_size)
    for scale in scales:
        if (scale is None) != (cache.dtype != torch.int8):
            raise MinivllmError(f"int8 caches need scales, and no others may have them; these are {cache.dtype}")
        if scale is None:
            continue
        if scale.shape != shape or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise MinivllmError(
                f"scales must be contiguous float32 [blocks, kv_heads, block_size] = {list(shape)}, "
                f"got {scale.dtype} {list(scale.shape)}"
            )
