"""Attention on a CPU: the choice between two implementations, and how they are called.

`benchmarks/kernels.py` measures both, and the lower bound (torch summing as many bytes as K and V
have): decodes of many and of few sequences, wide and narrow heads, whole prompts, fp32 and bf16.
The compiled loops win every row of `benchmarks/results/kernels.cpu.json`, so they run wherever
numba is installed and they support dtype and head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.attention_arguments import AttentionArguments
from minivllm.kernels.cpu.attention_gather import gather_attention
from minivllm.kernels.cpu.cells import AttentionCells, bits_of
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.platforms.threads import has_numba, run_programs

NO_WINDOW = 2**30  # more keys than a sequence has
LOG2E = 1.4426950408889634
# Dtypes of queries and outputs, and of caches, that the compiled loops know.
NUMBERS = (torch.float32, torch.bfloat16)
CACHES = (torch.float32, torch.bfloat16, torch.int8)


def unified_attention_cpu(out: Tensor, arguments: AttentionArguments) -> None:
    """Write each sequence's attention output to its rows of `out`."""
    if arguments.q.shape[2] % 16 == 0 and arguments.k_cache.dtype in CACHES and has_numba():
        numba_attention(out, arguments)
    else:
        gather_attention(out, arguments)


def numba_attention(out: Tensor, arguments: AttentionArguments) -> None:
    """Run the compiled loops of `attention_loops.py`, for head dims that are a multiple of 16."""
    q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, window, k_scales, v_scales = arguments
    _, heads, head_dim = q.shape
    in_place = out.dtype in NUMBERS and out.is_contiguous()
    result = out if in_place else torch.empty(out.shape, dtype=torch.float32)
    q = q.to(result.dtype)
    _, block_size, kv_heads, _ = k_cache.shape
    block_stride, slot_stride, head_stride, _ = k_cache.stride()
    cells = AttentionCells(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        slots_per_block=block_size,
        num_seqs=seq_lens.shape[0],
        block_stride=block_stride,
        slot_stride=slot_stride,
        head_stride=head_stride,
        table_stride=block_table.stride(0),
        q_stride=q.stride(0),
        sliding_window=window or NO_WINDOW,
        scale=bits_of(scale * LOG2E),
        query_start_loc=query_start_loc.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_table=block_table.data_ptr(),
        q=q.data_ptr(),
        out=result.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        k_scales=0 if k_scales is None else k_scales.data_ptr(),
        v_scales=0 if v_scales is None else v_scales.data_ptr(),
    )
    programs_for = loops("attention_loops").programs_for
    run_programs(programs_for(ELEMENTS[result.dtype], ELEMENTS[k_cache.dtype]), cells)
    if not in_place:
        tokens = int(query_start_loc[-1])  # rows of padding are left alone
        out[:tokens] = result[:tokens]
