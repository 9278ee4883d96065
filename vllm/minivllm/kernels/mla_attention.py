"""Attention over a paged cache of latents (MLA): writing the cache, and absorbed attention in
one ragged batch.

`concat_and_cache_mla(...)` writes a step's latents; `mla_attention(...)` attends. The caller
projects queries into the latent space before, and expands the outputs to values after
(`minivllm.models.latent_attention`), so all heads read the same keys, and the values are the first
`kv_lora_rank` numbers of these keys.

Layouts, with width = kv_lora_rank + rope_dim
    q            [tokens, heads, width]: the query of the latents, then the rotated part
    cache        [blocks, block_size, width]: the latent, then the rotated key; no heads, and no values
    out          [tokens, heads, kv_lora_rank]: weighted sums of latents
    query_start_loc, seq_lens, block_table, splits    as in `unified_attention.py`
    slot_mapping    int64 or int32 [tokens]; −1 marks a padding token, which is not written

Grid
    concat_and_cache_mla_kernel    a program for each token
    mla_attention_kernel           (query blocks, blocks of heads, splits): rows of the matrix products are
                                   position × head within the block

A program loads each tile of the cache once and uses it three times: the latents for the scores and
as values, the rotated keys for the scores. With ordinary heads a cache would have to be read once
for the keys and once for the values. Up to 16 heads fit one block; more take further blocks,
since BLOCK_M × kv_lora_rank sums must fit the registers, and each block of heads reads the cache
again (from the L2 cache, where they run side by side).

Must move, per layer: keys × width × bytes once per query block and block of heads; q and out once.
Must compute: 2 × heads × (width + kv_lora_rank) FLOPs for each (query, key) pair that is seen. In a
decode this is heads × (2 − rope_dim / width) × 2 / bytes FLOPs per byte: 16 heads of a
DeepSeek-V2-Lite in bf16 do 30 where a group of four ordinary heads does 4. So with many heads even
a decode becomes compute-bound.

In vLLM v0.33.0: `concat_and_cache_mla` in `csrc/cache_kernels.cu`;
`vllm/v1/attention/backends/mla/triton_mla.py` with
`vllm/v1/attention/ops/triton_decode_attention.py`. DeepSeek-V2, arXiv 2405.04434, section 2.1.

The CPU twin is in `cpu/mla_calls.py`; the launch code shared with `unified_attention.py` is
in `attention_launch.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.attention_arguments import MLAArguments
from minivllm.kernels.attention_configurations import Configuration, architecture
from minivllm.kernels.attention_launch import (
    dot_type,
    offset_type,
    padded,
    partials_for,
    splits_for,
)
from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.mla_calls import mla_attention_cpu, write_latents_cpu
from minivllm.kernels.tuning import fastest
from minivllm.kernels.unified_attention import (
    CHANGING,
    LOG2E,
    combine_splits,
    find_sequence,
    load_rows,
    softmax_step,
)
from minivllm.platforms.triton_utils import INTERPRETED, tl, triton

# A program takes as many heads as the smallest matrix product has rows.
MOST_HEADS = 16


# ---- writing -------------------------------------------------------------------------------------


@triton.jit
def concat_and_cache_mla_kernel(
    latent,
    k_rope,
    cache,
    slot_mapping,
    latent_stride,
    k_rope_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
):
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:  # else the token is padding
        target = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * (RANK + ROPE)
        column = tl.arange(0, PADDED_RANK)
        numbers = tl.load(latent + token * latent_stride + column, mask=column < RANK)
        tl.store(target + column, numbers, mask=column < RANK)
        column = tl.arange(0, PADDED_ROPE)
        rotated = tl.load(k_rope + token * k_rope_stride + column, mask=column < ROPE)
        tl.store(target + RANK + column, rotated, mask=column < ROPE)


def concat_and_cache_mla(
    latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor, *, backend: str | None = None
) -> None:
    """Write each token's latent `[tokens, rank]` and rotated key `[tokens, rope_dim]` into its slot
    of the cache.

    Tokens beyond `len(slot_mapping)` are not written. Two tokens must not share a slot. `backend`
    is "triton" or "cpu"; None follows the device. Shapes and types are not checked.
    """
    rank = latent.shape[1]
    rope = k_rope.shape[1]
    tokens = len(slot_mapping)
    if choose_backend(backend, latent) == "cpu":
        write_latents_cpu(latent[:tokens], k_rope[:tokens], cache, slot_mapping)
    elif tokens:
        concat_and_cache_mla_kernel[(tokens,)](
            latent, k_rope, cache, slot_mapping, latent.stride(0), k_rope.stride(0), cache.stride(0),
            BLOCK_SIZE=cache.shape[1],
            RANK=rank,
            ROPE=rope,
            PADDED_RANK=triton.next_power_of_2(rank),
            PADDED_ROPE=triton.next_power_of_2(rope),
            num_warps=1,
        )  # fmt: skip


# ---- attention -----------------------------------------------------------------------------------


@triton.jit
def attend_latents(
    peak,  # [BLOCK_M] largest score so far, in log2 units
    total,  # [BLOCK_M] sum of exp2(score − peak)
    acc,  # [BLOCK_M, PADDED_RANK] sum of exp2(score − peak) × latent
    q_latent,  # [BLOCK_M, PADDED_RANK]
    q_rope,  # [BLOCK_M, PADDED_ROPE]
    query_position,  # [BLOCK_M] position of each row in its sequence
    cache,
    table,  # at this program's sequence
    key_begin,
    key_end,  # whole tiles from key_begin (a multiple of TILE) to key_end
    key_limit,  # keys from here on are not there (MASKED)
    block_stride,
    to_log2,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    TILE: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys of [key_begin, key_end) to the running softmax. Unless MASKED, every row must
    see all of them.
    """
    rank = tl.arange(0, PADDED_RANK)
    rope = tl.arange(0, PADDED_ROPE)
    column = tl.arange(0, TILE)
    # Block numbers are loaded one tile ahead, so that no load of keys waits for another load.
    next_block = tl.load(table + (key_begin + column) // BLOCK_SIZE, mask=key_begin + column < key_limit, other=0)
    for tile in range(key_begin, key_end, TILE):
        key = tile + column
        key_is_real = key < key_limit
        slot = cache + next_block.to(OFFSET_TYPE) * block_stride + (key % BLOCK_SIZE) * (RANK + ROPE)
        next_block = tl.load(table + (key + TILE) // BLOCK_SIZE, mask=key + TILE < key_limit, other=0)
        latents = load_rows(slot[:, None] + rank[None, :], key_is_real, rank, RANK, PADDED_RANK, MASKED)
        rotated = load_rows(slot[:, None] + RANK + rope[None, :], key_is_real, rope, ROPE, PADDED_ROPE, MASKED)
        latents = latents.to(q_latent.dtype)  # [TILE, PADDED_RANK]: part of the keys, and all of the values
        rotated = rotated.to(q_latent.dtype)  # [TILE, PADDED_ROPE]
        scores = tl.dot(q_rope, tl.trans(rotated), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(key[None, :] <= query_position[:, None], scores, float("-inf"))

        peak, total, weights, shrink = softmax_step(peak, total, scores, to_log2, MASKED)
        acc = tl.dot(weights.to(q_latent.dtype), latents, acc * shrink[:, None], input_precision="ieee")
    return peak, total, acc


@triton.jit(do_not_specialize=CHANGING)
def mla_attention_kernel(
    out,
    q,
    cache,
    query_start_loc,
    seq_lens,
    block_table,
    partial_acc,  # fp32 [tokens, heads, splits, PADDED_RANK], used if SPLIT
    partial_stats,  # fp32 [tokens, heads, splits, 2]: peak, total
    num_seqs,
    num_splits,
    scale,
    q_stride,  # of a token
    out_stride,
    block_stride,
    table_stride,
    DOT_TYPE: tl.constexpr,  # input type of the matrix products; they accumulate in fp32
    OFFSET_TYPE: tl.constexpr,  # int64 for caches of 2**31 elements and more
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid (tokens // BLOCK_Q + sequences, blocks of heads, splits)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // BLOCK_H
    # Late positions see the most keys, so they start first.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = find_sequence(query_start_loc, index, num_seqs, BLOCK_Q)
    start = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - start
    first_query = (index - start // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= query_len:
        return
    context = tl.load(seq_lens + sequence) - query_len

    row = tl.arange(0, BLOCK_M)  # position × BLOCK_H + head within the block
    rank = tl.arange(0, PADDED_RANK)
    rope = tl.arange(0, PADDED_ROPE)
    query = first_query + row // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + row % BLOCK_H
    row_is_real = (query < query_len) & (head < HEADS)
    token = (start + query).to(tl.int64)
    q_rows = q + token[:, None] * q_stride + head[:, None] * (RANK + ROPE)
    q_latent = load_rows(q_rows + rank[None, :], row_is_real, rank, RANK, PADDED_RANK, True).to(DOT_TYPE)
    q_rope = load_rows(q_rows + RANK + rope[None, :], row_is_real, rope, ROPE, PADDED_ROPE, True).to(DOT_TYPE)

    # The tiles that some row sees are [first, end), those that every row sees whole [first,
    # whole_end).
    last_position = context + tl.minimum(first_query + BLOCK_Q, query_len) - 1
    first = 0
    end = tl.cdiv(last_position + 1, TILE)
    whole_end = (context + first_query + 1) // TILE
    if SPLIT:
        share = tl.cdiv(end, num_splits)
        first = tl.program_id(2) * share
        end = tl.minimum(end, first + share)
    whole_end = tl.minimum(tl.maximum(whole_end, first), end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_RANK], tl.float32)
    table = block_table + sequence.to(tl.int64) * table_stride
    position = context + query
    edges = (first, whole_end, end)
    for part in tl.static_range(2):
        peak, total, acc = attend_latents(
            peak, total, acc, q_latent, q_rope, position, cache, table,
            edges[part] * TILE, edges[part + 1] * TILE, last_position + 1, block_stride, scale * LOG2E,
            BLOCK_SIZE, RANK, ROPE, PADDED_RANK, PADDED_ROPE, TILE, OFFSET_TYPE, part == 1,
        )  # fmt: skip

    if SPLIT:
        part = (token * HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_stats + part * 2, peak, mask=row_is_real)
        tl.store(partial_stats + part * 2 + 1, total, mask=row_is_real)
        parts = partial_acc + part[:, None] * PADDED_RANK + rank[None, :]
        tl.store(parts, acc, mask=(row_is_real & (total > 0))[:, None])
    else:
        out_rows = out + token[:, None] * out_stride + head[:, None] * RANK + rank[None, :]
        result = acc / total[:, None]
        tl.store(out_rows, result.to(out.dtype.element_ty), mask=row_is_real[:, None] & (rank < RANK)[None, :])


def mla_attention(
    q: Tensor,
    cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    *,
    kv_lora_rank: int,
    out: Tensor | None = None,
    num_kv_splits: int | None = None,
    max_seq_len: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attend causally in a ragged batch, in the absorbed form; layouts as in the head of this file.
    Shapes and types are not checked: the engine makes all of these tensors.

    Args:
        scale: the factor applied to q · k, greater than 0.
        kv_lora_rank: how many of a row's first numbers are the latent.
        out: the output tensor; rows of padding tokens (beyond `query_start_loc[-1]`) are left
            unchanged.
        num_kv_splits: programs that share a sequence's keys; None: automatic. Ignored on the CPU.
        max_seq_len: the longest sequence, if the host knows; it only helps to choose the number of
            splits.
        backend: "triton" or "cpu"; None follows q's device. "triton" on CPU tensors needs Triton's
            interpreter.

    Returns:
        `out` `[tokens, heads, kv_lora_rank]`, of q's dtype.
    """
    arguments = MLAArguments(q, cache, query_start_loc, seq_lens, block_table, scale, kv_lora_rank)
    if out is None:
        out = torch.empty(*q.shape[:2], kv_lora_rank, dtype=q.dtype, device=q.device)
    if not len(q) or not len(seq_lens):
        return out
    if choose_backend(backend, q) == "cpu":
        mla_attention_cpu(out, arguments)
    else:
        _launch_fastest(out, arguments, num_kv_splits, max_seq_len)
    return out


def mla_configurations(gpu: str, element_bytes: int) -> list[Configuration]:
    """Return candidates, best guess first; `gpu` is a key of the tables in
    `attention_configurations.py`.

    The sums of all rows must fit the registers, so there are few rows, and wide tiles would only
    fill shared memory. fp32 fits for latents of up to 128 numbers; wider ones spill.
    """
    if element_bytes > 2:
        return [Configuration(16, 16, 8, 1)]
    if gpu == "gfx942":
        return [Configuration(16, 32, 4, 1), Configuration(16, 16, 4, 1)]
    return [Configuration(16, 32, 4, 2), Configuration(16, 32, 8, 2), Configuration(16, 64, 8, 2)]


def _launch_fastest(out: Tensor, arguments: MLAArguments, num_kv_splits: int | None, max_seq_len: int | None) -> None:
    """Launch the kernel with the fastest configuration for this class of steps."""
    q = arguments.q
    cache = arguments.cache
    sequences = len(arguments.seq_lens)
    tokens, heads, width = q.shape
    keys = max_seq_len or arguments.block_table.shape[1] * cache.shape[1]

    def launch(configuration: Configuration) -> None:
        programs = max(sequences, tokens) * triton.cdiv(heads, MOST_HEADS)
        launch_triton(out, arguments, num_kv_splits or splits_for(programs, keys, q.device, 2), configuration)

    if INTERPRETED:
        launch(Configuration(16, 32, 4, 1))
        return
    choices = mla_configurations(architecture(q.device), q.element_size())
    sizes = sequences.bit_length(), tokens.bit_length(), keys.bit_length()
    launch(fastest(choices, (q.device, q.dtype, heads, width, cache.shape[1], num_kv_splits, *sizes), launch))


def launch_triton(out: Tensor, arguments: MLAArguments, num_splits: int, configuration: Configuration) -> None:
    """Launch the kernel with this configuration, and `combine_kernel` if `num_splits` > 1. Each
    token's heads in q must be contiguous.
    """
    q, cache, query_start_loc, seq_lens, block_table, scale, rank = arguments
    tokens, heads, width = q.shape
    padded_rank = padded(rank)
    block_h = min(MOST_HEADS, triton.next_power_of_2(heads))
    partials = partials_for(q, out, num_splits, padded_rank)
    query_blocks = tokens // (configuration.block_m // block_h) + len(seq_lens)
    mla_attention_kernel[(query_blocks, triton.cdiv(heads, block_h), num_splits)](
        out, q, cache, query_start_loc, seq_lens, block_table, *partials, len(seq_lens), num_splits, float(scale),
        q.stride(0), out.stride(0), cache.stride(0), block_table.stride(0),
        DOT_TYPE=dot_type(q.dtype, cache.dtype),
        OFFSET_TYPE=offset_type(cache),
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        PADDED_RANK=padded_rank,
        PADDED_ROPE=padded(width - rank),
        BLOCK_SIZE=cache.shape[1],
        BLOCK_H=block_h,
        BLOCK_M=configuration.block_m,
        TILE=configuration.tile,
        SPLIT=num_splits > 1,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        combine_splits(out, *partials, query_start_loc)
