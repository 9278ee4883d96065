"""One attention kernel for all steps: prefill, chunks, decodes and verification in a ragged batch.

`unified_attention(...)`, at the end, is the entry point. On a GPU (and under Triton's interpreter)
it launches the kernel below, configured by `attention_configurations.py`; on a CPU it calls the
counterpart, `cpu/attention_calls.py`. The launch code shared with `mla_attention.py` is in
`attention_launch.py`.

Layouts
    q, out            [tokens, heads, head_dim], the queries of all sequences end to end
    k_cache, v_cache  [blocks, block_size, kv_heads, head_dim]: of q's dtype, float8_e4m3fn, or int8 with
    k_scales, v_scales  fp32 [blocks, kv_heads, block_size]: what a key's or value's integers are multiplied by
    query_start_loc   int32 [sequences + 1]: where each sequence's queries start in q
    seq_lens          int32 [sequences]: keys of each sequence, including those of its new tokens
    block_table       int32 [sequences, max blocks]: the blocks of each sequence, in order

Query i of a sequence sits at position seq_len − query_len + i and sees the keys up to itself:
causality needs nothing but this offset, so a decode is a query of length 1, a chunk one of length
n, a prefill one whose offset is 0.

Grid (query blocks, kv_heads, splits). Every head of a group reads the same keys, so a program takes
BLOCK_Q positions and all heads of one group: BLOCK_M = rows of a matrix product, row = position ×
group + head. There are tokens // BLOCK_Q + sequences query blocks, at least as many as needed
whatever the lengths are, so the host need not know them; a program finds its sequence by binary
search in query_start_loc, and those left over return at once. The heaviest programs (late
positions) start first. Where the host knows that no sequence has more than one query, as in a step
of decodes, program i takes sequence i, which saves the search, some ten dependent loads.

A program walks the keys in tiles of TILE, looks each key's block up in the table, and keeps the
online softmax's running (peak, total, weighted sum) in fp32. Scores are in units of log2, so that
exp is the hardware's exp2. Tiles that all rows see whole need no mask; they have a loop of their
own.

Splits. One decode of a long context has few programs and much to read. With splits > 1 each program
reads its share of the tiles and writes a partial (peak, total, weighted sum); `combine_kernel`
merges them. Splits that hold no key write a total of 0 and are ignored; rows of `out` that belong
to no sequence (padding of a CUDA graph) are never touched.

Quantized caches. The integers themselves go into the matrix products. A key's scale multiplies its
column of scores, and a value's scale its column of weights, so no tile is ever dequantized as a
whole.

Must move, per layer: K and V once per (sequence, query block), 2 × keys × kv_heads × head_dim ×
bytes; q and out once.
Must compute: 4 × head_dim × heads FLOPs for each (query, key) pair that is seen.
A decode does 2 × group / bytes FLOPs for each byte of K and V (a group of 4 in bf16: 4), far below
what a GPU can do, so it is memory-bound; a prefill of n tokens does about n / 2 times more
and is compute-bound.

In vLLM v0.33.0: `vllm/v1/attention/ops/triton_unified_attention.py`, `kernel_unified_attention` and
`reduce_segments`. Dao et al. 2022, arXiv:2205.14135 (tiles and the online softmax); Dao et al.
2023, "Flash-Decoding" (splits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minivllm.kernels.attention_arguments import AttentionArguments, check_arguments
from minivllm.kernels.attention_configurations import Configuration, architecture, configurations
from minivllm.kernels.attention_launch import (
    dot_type,
    offset_type,
    padded,
    partials_for,
    splits_for,
)
from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.attention_calls import unified_attention_cpu
from minivllm.kernels.cpu.attention_gather import gather_attention
from minivllm.kernels.tuning import fastest
from minivllm.platforms.triton_utils import INTERPRETED, tl, triton

LOG2E: Any = tl.constexpr(1.4426950408889634)
LOWEST: Any = tl.constexpr(-3.0e38)
# These arguments change from step to step. Triton would compile a kernel again where one is 1, or a
# multiple of 16.
CHANGING = ("num_seqs", "num_splits", "table_stride")
COMBINED_AT_ONCE = 16  # splits


# ---- the kernel ----------------------------------------------------------------------------------


@triton.jit
def find_sequence(query_start_loc, index, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the sequence of a query block: the last whose first block, start // BLOCK_Q +
    sequence, is not after it.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def load_rows(rows, row_is_real, dim, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Load `[rows, PADDED_DIM]`, with 0 in dimensions beyond HEAD_DIM and, if MASKED, in rows that
    are not real.
    """
    if MASKED:
        return tl.load(rows, mask=row_is_real[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        return tl.load(rows, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(rows)


@triton.jit
def softmax_step(peak, total, scores, to_log2, MASKED: tl.constexpr):
    """Update the running softmax with one tile's scores `[rows, TILE]`.

    Return the new peak and total, the weights of the tile's keys, and the factor by which older
    sums shrink.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1) * to_log2)
    reference = new_peak
    if MASKED:  # in a row that has seen no key yet, −inf − −inf is NaN
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * to_log2 - reference[:, None])
    # Everything summed so far is relative to the old peak.
    shrink = tl.exp2(peak - reference)
    total = total * shrink + tl.sum(weights, 1)
    return new_peak, total, weights, shrink


@triton.jit
def attend_tiles(
    peak,  # [BLOCK_M] largest score so far, in log2 units
    total,  # [BLOCK_M] sum of exp2(score − peak)
    acc,  # [BLOCK_M, PADDED_DIM] sum of exp2(score − peak) × value
    q,
    query_position,  # [BLOCK_M] position of each row in its sequence
    k_cache,  # at this program's head
    v_cache,
    k_scales,  # at this program's head, used if SCALED
    v_scales,
    table,  # at this program's sequence
    key_begin,
    key_end,  # whole tiles from key_begin (a multiple of TILE) to key_end
    key_limit,  # keys from here on are not there (MASKED)
    block_stride,
    slot_stride,
    scale_stride,  # of a block in the scales
    to_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys of [key_begin, key_end) to the running softmax. Unless MASKED, every row must
    see all of them.
    """
    dim = tl.arange(0, PADDED_DIM)
    column = tl.arange(0, TILE)
    # Block numbers are loaded one tile ahead, so that no load of keys waits for another load.
    next_block = tl.load(table + (key_begin + column) // BLOCK_SIZE, mask=key_begin + column < key_limit, other=0)
    for tile in range(key_begin, key_end, TILE):
        key = tile + column
        key_is_real = key < key_limit
        slot = next_block.to(OFFSET_TYPE) * block_stride + (key % BLOCK_SIZE) * slot_stride
        scale_at = next_block.to(OFFSET_TYPE) * scale_stride + key % BLOCK_SIZE
        next_block = tl.load(table + (key + TILE) // BLOCK_SIZE, mask=key + TILE < key_limit, other=0)
        at = slot[:, None] + dim[None, :]  # [TILE, PADDED_DIM]

        keys = load_rows(k_cache + at, key_is_real, dim, HEAD_DIM, PADDED_DIM, MASKED).to(q.dtype)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, TILE]
        if SCALED:  # a key's scale multiplies its column, so that the tile need not be dequantized
            scores = scores * tl.load(k_scales + scale_at, mask=key_is_real, other=0.0)[None, :]
        if MASKED:
            seen = key[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))

        peak, total, weights, shrink = softmax_step(peak, total, scores, to_log2, MASKED)
        if SCALED:
            weights = weights * tl.load(v_scales + scale_at, mask=key_is_real, other=0.0)[None, :]
        values = load_rows(v_cache + at, key_is_real, dim, HEAD_DIM, PADDED_DIM, MASKED).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit(do_not_specialize=CHANGING)
def unified_attention_kernel(
    out,
    q,
    k_cache,
    v_cache,
    k_scales,  # used if SCALED
    v_scales,
    query_start_loc,
    seq_lens,
    block_table,
    partial_acc,  # fp32 [tokens, heads, splits, PADDED_DIM], used if SPLIT
    partial_stats,  # fp32 [tokens, heads, splits, 2]: peak, total
    num_seqs,
    num_splits,
    scale,
    q_stride,  # of a token; heads of q and out are HEAD_DIM apart
    out_stride,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    DOT_TYPE: tl.constexpr,  # input type of the matrix products; they accumulate in fp32
    OFFSET_TYPE: tl.constexpr,  # int64 for caches of 2**31 elements and more
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALED: tl.constexpr,
    SINGLE: tl.constexpr,  # no sequence has more than one query: the grid is (sequences, kv_heads, splits)
):
    """Grid (tokens // BLOCK_Q + sequences, kv_heads, splits)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # Late positions see the most keys, so they start first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    if SINGLE:
        sequence = index
    else:
        sequence = find_sequence(query_start_loc, index, num_seqs, BLOCK_Q)
    start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    if SINGLE:
        first_query = 0
    else:
        first_query = (index - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= query_len:  # the grid has room for more blocks than this batch needs
        return
    context = tl.load(seq_lens + sequence) - query_len

    row = tl.arange(0, BLOCK_M)  # position × GROUP + head of the group
    dim = tl.arange(0, PADDED_DIM)
    query = first_query + row // GROUP
    row_is_real = (row < BLOCK_Q * GROUP) & (query < query_len)
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    q_rows = q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None, :]
    queries = load_rows(q_rows, row_is_real, dim, HEAD_DIM, PADDED_DIM, True).to(DOT_TYPE)

    # The tiles that some row sees are [first, end), those that every row sees whole [whole_first,
    # whole_end).
    first_position = context + first_query
    last_position = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    whole_first = 0
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE
        whole_first = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), TILE)
    end = tl.cdiv(last_position + 1, TILE)
    whole_end = (first_position + 1) // TILE
    if SPLIT:  # this program's share of the tiles
        share = tl.cdiv(end - first, num_splits)
        first = first + tl.program_id(2) * share
        end = tl.minimum(end, first + share)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    k_head = k_cache + kv_head.to(tl.int64) * head_stride
    v_head = v_cache + kv_head.to(tl.int64) * head_stride
    k_scales += kv_head * BLOCK_SIZE
    v_scales += kv_head * BLOCK_SIZE
    scale_stride = tl.num_programs(1) * BLOCK_SIZE
    table = block_table + sequence.to(tl.int64) * table_stride
    position = context + query
    # Tiles at the window's edge, whole ones, and those at the end, which causality cuts: only the
    # middle needs no mask.
    edges = (first, whole_first, whole_end, end)
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        peak, total, acc = attend_tiles(
            peak, total, acc, queries, position, k_head, v_head, k_scales, v_scales, table,
            edges[part] * TILE, edges[part + 1] * TILE, last_position + 1,
            block_stride, slot_stride, scale_stride, scale * LOG2E,
            BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE, WINDOW, OFFSET_TYPE, SCALED, part != 1,
        )  # fmt: skip

    if SPLIT:
        part = (token * tl.num_programs(1) * GROUP + head) * num_splits + tl.program_id(2)
        tl.store(partial_stats + part * 2, peak, mask=row_is_real)
        tl.store(partial_stats + part * 2 + 1, total, mask=row_is_real)
        parts = partial_acc + part[:, None] * PADDED_DIM + dim[None, :]
        tl.store(parts, acc, mask=(row_is_real & (total > 0))[:, None])
    else:
        out_rows = out + token[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None, :]
        result = acc / total[:, None]
        tl.store(out_rows, result.to(out.dtype.element_ty), mask=row_is_real[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=CHANGING)
def combine_kernel(
    out,
    partial_acc,
    partial_stats,
    query_start_loc,
    num_seqs,
    num_splits,
    out_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # that are loaded at once
):
    """Grid (tokens, heads): combine partial outputs into one row, weighted by exp2(peak −
    highest peak).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(query_start_loc + num_seqs):  # padding of a CUDA graph
        return
    dim = tl.arange(0, PADDED_DIM)
    first_part = (token * tl.num_programs(1) + head) * num_splits
    highest = LOWEST  # not −inf: the first splits may have seen no key, and −inf − −inf is NaN
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        part = first_part + split
        peak = tl.load(partial_stats + part * 2, mask=split < num_splits, other=float("-inf"))
        new_highest = tl.maximum(highest, tl.max(peak, 0))
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(peak - new_highest)
        totals = tl.load(partial_stats + part * 2 + 1, mask=split < num_splits, other=0.0)
        saw_keys = totals != 0.0  # a NaN, too: where all scores are, the peak is still −inf
        sums = tl.load(partial_acc + part[:, None] * PADDED_DIM + dim[None, :], mask=saw_keys[:, None], other=0.0)
        total = total * shrink + tl.sum(weight * totals, 0)
        acc = acc * shrink + tl.sum(sums * weight[:, None], 0)
        highest = new_highest
    at = out + token * out_stride + head * HEAD_DIM + dim
    tl.store(at, (acc / total).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


# ---- the entrance --------------------------------------------------------------------------------


def unified_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    out: Tensor | None = None,
    sliding_window: int | None = None,
    num_kv_splits: int | None = None,
    max_seq_len: int | None = None,
    max_query_len: int | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> Tensor:
    """Attend causally in a ragged batch over paged K and V; layouts as in the head of this file.

    Args:
        scale: the factor applied to q · k, greater than 0 (usually head_dim ** −0.5).
        k_scales, v_scales: the scales of int8 caches; see the head of this file.
        out: the output tensor, `[tokens, heads, head_dim]`; rows of padding tokens (beyond
            `query_start_loc[-1]`) are left unchanged.
        sliding_window: a query sees itself and the `sliding_window` − 1 keys before it.
        num_kv_splits: programs that share a sequence's keys; None: automatic. Ignored on the CPU.
        max_seq_len: the longest sequence, if the host knows; else the block table's width bounds
            it. It only helps to choose the number of splits: a wrong value costs time, never
            correctness.
        max_query_len: the maximum queries per sequence, if the host knows. 1 saves the search for
            each program's sequence; it must be true.
        backend: "triton" or "cpu"; None follows q's device. "triton" on CPU tensors needs Triton's
            interpreter. "naive" is a baseline: PyTorch, one sequence at a time, with its keys and
            values gathered and the full score matrix materialized.
        checked: skip the checks, since a call with the same shapes and types has passed them (a
            step's first layer).

    Returns:
        `out`, of q's dtype.

    Raises:
        MinivllmError: shapes, types or values are invalid.
    """
    arguments = AttentionArguments(
        q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, sliding_window, k_scales, v_scales
    )
    if not checked:
        check_arguments(arguments)
    if q.stride()[1:] != (q.shape[2], 1):  # a token's heads lie side by side, as a fused projection leaves them
        arguments = arguments._replace(q=q.contiguous())
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.shape[0] == 0 or seq_lens.shape[0] == 0:
        return out
    if backend == "naive":
        gather_attention(out, arguments, naive=True)
    elif choose_backend(backend, q) == "cpu":
        unified_attention_cpu(out, arguments)
    else:
        _launch_fastest(out, arguments, num_kv_splits, max_seq_len, max_query_len == 1)
    return out


def _launch_fastest(
    out: Tensor, arguments: AttentionArguments, num_kv_splits: int | None, max_seq_len: int | None, single: bool
) -> None:
    """Launch the kernel with the fastest configuration for this class of steps."""
    q, k_cache, window = arguments.q, arguments.k_cache, arguments.sliding_window
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    sequences = len(arguments.seq_lens)
    group = heads // kv_heads
    rows = -(-tokens // sequences) * group  # of a matrix product, if all sequences are as long
    keys = min(max_seq_len or arguments.block_table.shape[1] * block_size, window or 2**31)

    def launch(configuration: Configuration) -> None:
        programs = max(sequences, tokens * group // configuration.block_m) * kv_heads
        # Two programs a multiprocessor for one-byte caches: with one, a long decode was slower
        # there (PERFORMANCE.md).
        splits = num_kv_splits or splits_for(programs, keys, q.device, 1 if k_cache.itemsize > 1 else 2)
        launch_triton(out, arguments, splits, configuration, single)

    if INTERPRETED:
        launch(Configuration(min(max(16, triton.next_power_of_2(max(rows, group))), 64), 32, 4, 1))
        return
    # Everything that the kernel is compiled for, and how much work there is, to a factor of two.
    shape_class = (
        q.device, q.dtype, k_cache.dtype, heads, group, head_dim, block_size, window, single,
        num_kv_splits, sequences.bit_length(), tokens.bit_length(), keys.bit_length(),
    )  # fmt: skip
    choices = configurations(architecture(q.device), rows, group, padded(head_dim), q.itemsize, k_cache.itemsize)
    launch(fastest(choices, shape_class, launch))


def launch_triton(
    out: Tensor, arguments: AttentionArguments, num_splits: int, configuration: Configuration, single: bool = False
) -> None:
    """Launch the kernel with this configuration, and `combine_kernel` if `num_splits` > 1. Each
    token's heads in q must be contiguous.

    `single`: no sequence has more than one query.
    """
    q, k_cache, v_cache, query_start_loc, seq_lens, block_table, scale, window, *scales = arguments
    scaled = scales[0] is not None
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    padded_dim = padded(head_dim)
    partials = partials_for(q, out, num_splits, padded_dim)
    query_blocks = len(seq_lens) if single else tokens // (configuration.block_m // group) + len(seq_lens)
    unified_attention_kernel[(query_blocks, kv_heads, num_splits)](
        out, q, k_cache, v_cache, *(scales if scaled else (k_cache, v_cache)), query_start_loc, seq_lens, block_table,
        *partials, len(seq_lens), num_splits, float(scale),
        q.stride(0), out.stride(0), *k_cache.stride()[:3], block_table.stride(0),
        DOT_TYPE=dot_type(q.dtype, k_cache.dtype),
        OFFSET_TYPE=offset_type(k_cache),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=configuration.block_m,
        TILE=configuration.tile,
        WINDOW=window or 0,
        SPLIT=num_splits > 1,
        SCALED=scaled,
        SINGLE=single,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        combine_splits(out, *partials, query_start_loc)


def combine_splits(out: Tensor, partial_acc: Tensor, partial_stats: Tensor, query_start_loc: Tensor) -> None:
    """Launch `combine_kernel`: out `[tokens, heads, dim]`, partial_acc `[tokens, heads, splits,
    padded dim]`.
    """
    tokens, heads, num_splits, padded_dim = partial_acc.shape
    combine_kernel[(tokens, heads)](
        out, partial_acc, partial_stats, query_start_loc, len(query_start_loc) - 1, num_splits, out.stride(0),
        HEAD_DIM=out.shape[2],
        PADDED_DIM=padded_dim,
        SPLITS=COMBINED_AT_ONCE,
    )  # fmt: skip
