"""Attention on a CPU: which of two forms runs, and how it is called.

`benchmarks/kernels.py` measures both, and the floor under them (torch summing up as many bytes as K and V have):
decodes of many and of few sequences, wide and narrow heads, whole prompts, fp32 and bf16. The compiled loops win every
row of `benchmarks/results/kernels.cpu.json`, so they run wherever numba is installed and knows the type and the head.
"""

from __future__ import annotations

import functools
from array import array
from typing import Any

import torch

from minivllm.kernels.cpu.attention_gather import gather_attention
from minivllm.platforms.threads import has_numba, run_programs

LOG2E = 1.4426950408889634
ELEMENTS = {torch.float32: "float32", torch.bfloat16: "uint16", torch.int8: "int8"}
"""What the caches' elements are to NumPy, for the types that the compiled loops know."""


def unified_attention_cpu(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Write the attention of every sequence to its rows of `out`; arguments as `unified_attention`'s."""
    arguments = (q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, sliding_window, soft_cap)
    arguments = (*arguments, k_scales, v_scales)
    if q.shape[2] % 16 == 0 and k_cache.dtype in ELEMENTS and has_numba():
        numba_attention(out, *arguments)
    else:
        gather_attention(out, *arguments)


def numba_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """The compiled loops of `attention_loops.py`, for heads that are a multiple of 16 wide."""
    in_place = out.dtype == torch.float32 and out.is_contiguous()
    result = out if in_place else torch.empty(out.shape, dtype=torch.float32)
    q = q.float() if q.stride()[1:] == (q.shape[2], 1) else q.float().contiguous()
    factors = array("f", [scale * LOG2E, soft_cap or 0.0])
    run_programs(
        _programs(k_cache.dtype),
        [
            q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], len(seq_lens),
            *k_cache.stride()[:3], block_table.stride(0), sliding_window or 2**30,
            query_start_loc.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), q.data_ptr(), result.data_ptr(),
            factors.buffer_info()[0], k_cache.data_ptr(), v_cache.data_ptr(),
            *(0 if scales is None else scales.data_ptr() for scales in (k_scales, v_scales)),
            q.stride(0),
        ],
    )  # fmt: skip
    if not in_place:
        tokens = int(query_start_loc[-1])
        out[:tokens] = result[:tokens]


@functools.cache
def _programs(dtype: torch.dtype) -> Any:
    """numba takes a second to import, so only who needs it does."""
    import numpy as np

    from minivllm.kernels.cpu.attention_loops import programs_for

    return programs_for(getattr(np, ELEMENTS[dtype]))
