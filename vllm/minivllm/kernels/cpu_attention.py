"""Attention on a CPU: which of two forms runs, and how it is called.

The choice, measured on two cores of an AMD EPYC (Zen 4), one layer, best of 40 runs in milliseconds;
`benchmarks/kernels.py` measures the same on any machine.

    one step                                       floor   numba   gather + torch's attention
    128 decodes of 32–500 tokens, fp32              0.12    0.51    8.0
    the same, bf16                                  0.17    0.89   26.7
    16 decodes, 32 heads, 8 KV heads, d = 128       0.85    3.0    26.5
    one decode of 4,096 tokens                      0.04    0.10    1.0
    prefill of 512 tokens                           0.03    1.3     2.2 (without the gather)
    prefill of 2,048 tokens                         0.11   17      23 (without the gather)

(8 heads, 2 KV heads, d = 32, blocks of 16 where nothing else is said; the floor is torch summing up as many bytes.)
So numba, wherever it is installed and knows the type and the head; Triton's interpreter takes 14 s for the first row.
"""

from __future__ import annotations

import functools
from array import array
from importlib.util import find_spec
from typing import Any

import torch

from minivllm.kernels.torch_attention import gather_attention
from minivllm.kernels.torch_threads import run_on_threads

LOG2E = 1.4426950408889634


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
) -> None:
    """Write the attention of every sequence to its rows of `out`; arguments as `unified_attention`'s."""
    arguments = (q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, sliding_window, soft_cap)
    if q.shape[2] % 16 == 0 and q.dtype != torch.float16 and has_numba():
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
) -> None:
    """The compiled loops of `numba_attention.py`, for heads that are a multiple of 16 wide."""
    in_place = out.dtype == torch.float32 and out.is_contiguous()
    result = out if in_place else torch.empty(out.shape, dtype=torch.float32)
    q = q.float().contiguous()
    factors = array("f", [scale * LOG2E, soft_cap or 0.0])
    block = array(
        "q",
        [
            0, q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[1], len(seq_lens),
            *k_cache.stride()[:3], block_table.stride(0), sliding_window or 2**30,
            query_start_loc.data_ptr(), seq_lens.data_ptr(), block_table.data_ptr(), q.data_ptr(), result.data_ptr(),
            factors.buffer_info()[0], k_cache.data_ptr(), v_cache.data_ptr(),
        ],
    )  # fmt: skip
    run_on_threads(_programs(k_cache.dtype), block.buffer_info()[0], torch.get_num_threads())
    if not in_place:
        tokens = int(query_start_loc[-1])
        out[:tokens] = result[:tokens]


@functools.cache
def has_numba() -> bool:
    """Whether the compiled loops can run here."""
    return find_spec("numba") is not None


@functools.cache
def _programs(dtype: torch.dtype) -> Any:
    """numba takes a second to import, so only who needs it does."""
    import numpy as np

    from minivllm.kernels.numba_attention import programs_for

    return programs_for(np.uint16 if dtype == torch.bfloat16 else np.float32)
