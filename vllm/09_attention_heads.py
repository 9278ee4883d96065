"""Lesson 09. Attention heads: which of them need keys and values of their own?

Builds grouped attention (MHA, GQA and MQA are one function), multi-head latent attention in both of its forms, a decode
kernel that puts a whole group into the rows of one matmul, and one that attends to latents. You learn what sharing
saves in bytes and in time, why 128 heads can attend to a cached latent without making any keys, and why both gains end
when a model is divided over more GPUs than it has KV heads.

    uv run python vllm/09_attention_heads.py                       # under a minute on a laptop, no GPU needed
    uv run python vllm/09_attention_heads.py --heads 64 --head-dim 64 --context 4096
"""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.attention_heads import kernel_cases, report
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1. The pain: every token stays in memory, and every step reads them all


def cached_per_token(config: ModelConfig) -> int:
    """Count the numbers that one layer keeps of a token: K and V of each KV head, or a latent and a rotary key."""
    if config.kv_lora_rank:
        return config.kv_lora_rank + (config.qk_rope_head_dim or 0)
    return 2 * config.num_key_value_heads * config.head_dim


def decode_flops_per_byte(config: ModelConfig, bytes_per_number: int = 2) -> float:
    """Return a decode step's operations in attention for each byte of the cache that it reads."""
    if config.kv_lora_rank:  # scores over latent and rotary key, then the sum of latents
        products = config.num_attention_heads * (cached_per_token(config) + config.kv_lora_rank)
    else:
        products = config.num_attention_heads * 2 * config.head_dim
    return 2 * products / (bytes_per_number * cached_per_token(config))


# %% 2. The idea: several query heads share their keys


# region: grouped
def grouped_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend causally: query head h uses KV head h // group; keys and values are never repeated.

    q [queries, heads, head_dim], of the last positions; keys, values [positions, kv_heads, head_dim] -> like q.
    With as many KV heads as heads this is multi-head attention, with one it is multi-query attention.
    """
    (queries, heads, head_dim), (positions, kv_heads, _) = q.shape, keys.shape
    grouped = q.reshape(queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("qkgd,pkd->kgqp", grouped, keys) / math.sqrt(head_dim)
    position = positions - queries + torch.arange(queries, device=q.device)
    ahead = torch.arange(positions, device=q.device) > position[:, None]
    weights = scores.masked_fill(ahead, -math.inf).softmax(dim=-1)
    return torch.einsum("kgqp,pkd->qkgd", weights, values).reshape(q.shape)


# endregion


def pool_heads(weight: Tensor, kv_heads: int, into: int) -> Tensor:
    """Return a K or V projection with fewer heads, each the mean of those it replaces (the GQA paper's conversion).

    weight [kv_heads * head_dim, hidden] -> [into * head_dim, hidden].
    """
    return weight.view(into, kv_heads // into, -1, weight.shape[1]).mean(dim=1).flatten(0, 1)


# %% 3. The other idea: keep one latent for all heads, and never turn it into keys


# region: latent
def plain_attention(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor
) -> Tensor:
    """Compute latent attention as defined, the plain form: make all heads' keys and values, then attend to them.

    One query: q_nope [heads, nope], q_rope [heads, rope]. The cache: latents [positions, rank], k_rope [positions,
    rope]. Weights: w_uk [heads, nope, rank], w_uv [heads, v, rank] -> [heads, v].
    """
    k_nope = torch.einsum("pr,hnr->phn", latents, w_uk)
    values = torch.einsum("pr,hvr->phv", latents, w_uv)
    scores = torch.einsum("hn,phn->hp", q_nope, k_nope) + torch.einsum("hr,pr->hp", q_rope, k_rope)
    weights = (scores / math.sqrt(q_nope.shape[1] + q_rope.shape[1])).softmax(dim=-1)
    return torch.einsum("hp,phv->hv", weights, values)


def absorbed_attention(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor
) -> Tensor:
    """Compute latent attention without any keys: apply w_uk to the query, and w_uv to the sum of latents."""
    q_latent = torch.einsum("hn,hnr->hr", q_nope, w_uk)
    scores = q_latent @ latents.T + q_rope @ k_rope.T
    weights = (scores / math.sqrt(q_nope.shape[1] + q_rope.shape[1])).softmax(dim=-1)
    return torch.einsum("hr,hvr->hv", weights @ latents, w_uv)


# endregion

# %% 4. The kernels: a group in the rows of one matmul


# region: kernels
@triton.jit
def scores_kernel(
    scores, q, keys, tokens, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Compute q · k for all heads and tokens: scores [heads, tokens]. Grid: (kv_heads, ceil(tokens / TILE)).

    q [heads, HEAD_DIM]; keys [tokens, kv_heads, HEAD_DIM]; ROWS >= GROUP. Every key is read once, by one program.
    """
    kv_head, row, column = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    head = kv_head * GROUP + row
    real, there = (row < GROUP)[:, None], (token < tokens)[:, None]
    queries = tl.load(q + head[:, None] * HEAD_DIM + column[None, :], mask=real, other=0.0)
    at = (token[:, None] * tl.num_programs(0) + kv_head) * HEAD_DIM + column[None, :]
    key = tl.load(keys + at, mask=there, other=0.0)
    products = tl.dot(queries, tl.trans(key), input_precision="ieee")
    tl.store(scores + head[:, None] * tokens + token[None, :], products, mask=real & (token < tokens)[None, :])


@triton.jit
def group_kernel(
    out, q, keys, values, tokens, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute decode attention of one request: out [heads, HEAD_DIM]. Grid: (kv_heads,). Else as `scores_kernel`.

    Keeps a running maximum m, a sum l and a sum of values for each row, over tiles of TILE tokens (lesson 03).
    """
    kv_head, row, column = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    real = (row < GROUP)[:, None]
    at_row = (kv_head * GROUP + row)[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + at_row, mask=real, other=0.0)
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)  # noqa: E741
    result = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(0, tokens, TILE):
        token = start + tl.arange(0, TILE)
        at = (token[:, None] * tl.num_programs(0) + kv_head) * HEAD_DIM + column[None, :]
        there = (token < tokens)[:, None]
        key, value = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((token < tokens)[None, :], scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights, keep = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * keep + tl.sum(weights, axis=1)  # noqa: E741
        result = tl.dot(weights.to(value.dtype), value, result * keep[:, None], input_precision="ieee")
        m = new_m
    tl.store(out + at_row, result / l[:, None], mask=real)


@triton.jit
def decode_kernel(
    out, q, keys, values, lengths, slots, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Decode many requests, HEADS query heads a program. Grid: (requests, KV_HEADS * GROUP / HEADS).

    q, out [requests, heads, HEAD_DIM]; keys, values [requests, slots, KV_HEADS, HEAD_DIM]; lengths int32 [requests].
    HEADS divides GROUP; with HEADS = GROUP a whole group shares what its program reads, with HEADS = 1 none do. Reads
    2 * length * HEAD_DIM numbers of keys and values a program, so each of them GROUP / HEADS times. The matmul has ROWS
    rows, a power of two, at least HEADS. A request of length 0 gets zeros.
    """
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    length, in_head = tl.load(lengths + request), (column < HEAD_DIM)[None, :]
    # 1. The matmul has ROWS rows, but only HEADS of them are this program's: neither load nor store the others.
    real = (row < HEADS)[:, None] & in_head
    at_row = (request * (KV_HEADS * GROUP) + part * HEADS + row)[:, None] * HEAD_DIM + column[None, :]
    # 2. A row for each query head.
    queries = tl.load(q + at_row, mask=real, other=0.0)
    # 3. All of them read the same KV head.
    first = (request * slots * KV_HEADS + part * HEADS // GROUP) * HEAD_DIM
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)  # noqa: E741
    result = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        at = first + token[:, None].to(tl.int64) * (KV_HEADS * HEAD_DIM) + column[None, :]
        there = (token < length)[:, None] & in_head
        # 4. A tile of keys and values, loaded once for all rows.
        key, value = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)
        # 5. One matmul: the scores of all rows. The rest of the loop is lesson 03's, with a maximum and a sum a row.
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((token < length)[None, :], scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights, keep = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * keep + tl.sum(weights, axis=1)  # noqa: E741
        result = tl.dot(weights.to(value.dtype), value, result * keep[:, None], input_precision="ieee")
        m = new_m
    # 6. Each row is divided by its own sum.
    tl.store(out + at_row, result / tl.maximum(l, 1e-30)[:, None], mask=real)


# endregion


# region: latent_kernel
@triton.jit
def latent_kernel(
    out, q, cache, lengths, slots, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute absorbed latent attention of many requests, ROWS heads a program. Grid: (requests, ceil(HEADS / ROWS)).

    q [requests, HEADS, RANK + ROPE]: the absorbed query, then its rotary part. cache [requests, slots, RANK + ROPE]:
    a latent, then the rotary key, of each token. out [requests, HEADS, RANK]: sums of latents, before w_uv is applied.
    RANK and ROPE are powers of two. A latent is read once and serves as key and as value: RANK + ROPE numbers a token
    and program, for 2 * ROWS * (2 * RANK + ROPE) operations.
    """
    WIDTH: tl.constexpr = RANK + ROPE
    request = tl.program_id(0).to(tl.int64)
    head, column, turned = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    real, length = (head < HEADS)[:, None], tl.load(lengths + request)
    at_row = (request * HEADS + head)[:, None]
    queries = tl.load(q + at_row * WIDTH + column[None, :], mask=real, other=0.0)
    rotary = tl.load(q + at_row * WIDTH + turned[None, :], mask=real, other=0.0)
    m, l = tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)  # noqa: E741
    result = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        at, there = cache + (request * slots + token)[:, None] * WIDTH, (token < length)[:, None]
        latent = tl.load(at + column[None, :], mask=there, other=0.0)
        k_rope = tl.load(at + turned[None, :], mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(rotary, tl.trans(k_rope), scores, input_precision="ieee") * scale
        scores = tl.where((token < length)[None, :], scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        weights, keep = tl.exp(scores - new_m[:, None]), tl.exp(m - new_m)
        l = l * keep + tl.sum(weights, axis=1)  # noqa: E741
        result = tl.dot(weights.to(latent.dtype), latent, result * keep[:, None], input_precision="ieee")
        m = new_m
    tl.store(out + at_row * RANK + column[None, :], result / tl.maximum(l, 1e-30)[:, None], mask=real)


# endregion

LEAST_ROWS, TILE = 16, 32


def launched(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; `trace_kernel` takes the same arguments, and counts the bytes that are read."""
    kernel[grid](*arguments, **constants)


def padded_rows(heads: int) -> int:
    """Return the rows of a matmul that holds `heads`: a power of two, at least 16."""
    return max(LEAST_ROWS, triton.next_power_of_2(heads))


def decode(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, heads_a_program: int = 0, launch: Callable = launched
) -> Tensor:
    """Compute `grouped_attention` for the last token of many requests; 0 heads a program means a whole group.

    q [requests, heads, head_dim]; keys, values [requests, slots, kv_heads, head_dim], contiguous; lengths int32.
    """
    (requests, heads, head_dim), (_, slots, kv_heads, _) = q.shape, keys.shape
    group, out = heads // kv_heads, torch.empty_like(q)
    part = heads_a_program or group
    launch(
        decode_kernel, (requests, heads // part), out, q, keys, values, lengths, slots, 1 / math.sqrt(head_dim),
        HEADS=part, GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=max(LEAST_ROWS, triton.next_power_of_2(head_dim)), ROWS=padded_rows(part), TILE=TILE,
    )  # fmt: skip
    return out


def latent_decode(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, lengths: Tensor, w_uk: Tensor, w_uv: Tensor,
    rows: int = LEAST_ROWS, launch: Callable = launched,
) -> Tensor:  # fmt: skip
    """Compute `absorbed_attention` for many requests: [requests, heads, v].

    q_nope [requests, heads, nope], q_rope [requests, heads, rope]; cache [requests, slots, rank + rope], contiguous.
    """
    (requests, heads, nope), rope, rank = q_nope.shape, q_rope.shape[2], w_uk.shape[2]
    q = torch.cat([torch.einsum("bhn,hnr->bhr", q_nope, w_uk), q_rope], dim=-1)
    out = q.new_empty(requests, heads, rank)
    launch(
        latent_kernel, (requests, triton.cdiv(heads, rows)), out, q, cache, lengths, cache.shape[1],
        1 / math.sqrt(nope + rope), HEADS=heads, RANK=rank, ROPE=rope, ROWS=rows, TILE=TILE,
    )  # fmt: skip
    return torch.einsum("bhr,hvr->bhv", out, w_uv)


# %% 6. Break it: more GPUs than KV heads


# region: replication
def kv_heads_of_rank(rank: int, tp: int, num_kv_heads: int) -> list[int]:
    """Return the KV heads that one of `tp` ranks keeps: its share, or one head that its neighbours keep too.

    Raises:
        MinivllmError: neither number divides the other.
    """
    if num_kv_heads % tp and tp % num_kv_heads:
        raise MinivllmError(f"{num_kv_heads} KV heads cannot be divided over {tp} ranks, nor the other way round")
    if tp >= num_kv_heads:
        return [rank // (tp // num_kv_heads)]
    share = num_kv_heads // tp
    return list(range(rank * share, (rank + 1) * share))


# endregion


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 09. Attention heads", arguments), Control()
    report.check(arguments)
    heading("1. The bytes of a token, and the operations for each byte")
    figures: dict = {"models": report.show_models(cached_per_token, decode_flops_per_byte)}
    heading("2. Fewer KV heads: bytes and time")
    with control.watch():
        figures["shared"] = report.measure_shared(grouped_attention, arguments, device)
    heading("3. One latent for all heads")
    with control.watch():
        figures["latent"] = report.measure_latent(plain_attention, absorbed_attention, arguments, device)
    heading("4. The kernels")
    code = grouped_attention, absorbed_attention, decode, latent_decode
    figures["kernels"] = prove(partial(kernel_cases.verify_kernels, *code, quick=arguments.quick), device)
    heading("5. What sharing costs")
    figures["pooled"] = report.measure_pooled(pool_heads, arguments, device)
    heading("6. Break it: more GPUs than KV heads")
    figures["ranks"] = report.show_ranks(kv_heads_of_rank)
    report.close(figures, control.disturbance())
    keep(__file__, figures, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
