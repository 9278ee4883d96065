"""Lesson 05. The optimization catalog: prefix caching and three more levers, what each acts on and how each breaks.

Builds prefix caching's hashes and their look-up, an int8 KV cache and weights with their kernels, int4 weights in
groups, the padding of CUDA graphs, and tensor parallelism on two ranks. You learn which part of a step each lever cuts.

    uv run python vllm/05_optimization_catalog.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/05_optimization_catalog.py --users 16 --group 32
"""

import hashlib
import math
import struct
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.models.loader import load_model
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.engines.quality import held_out_tokens
from minivllm_lab.lesson import begin, keep
from minivllm_lab.optimization_catalog import quantization, report
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, prove, show_errors
from minivllm_lab.tables import console, heading


# %% 1. Prefix caching: a block's hash stands for everything before it
# region: block_hashes
def hash_block_tokens(parent: bytes, token_ids: Sequence[int], extra_keys: bytes = b"") -> bytes:
    """Hash the block that holds `token_ids` and follows the block with the hash `parent`, to 32 bytes."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids) + extra_keys).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, extra_keys: bytes = b"") -> list[bytes]:
    """Hash the full blocks, in order; `extra_keys` go into the first, and the chain carries them on."""
    hashes, parent = [], bytes(32)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block_tokens(parent, token_ids[start : start + block_size], b"" if start else extra_keys)
        hashes.append(parent)
    return hashes


def find_longest_cache_hit(hashes: Sequence[bytes], num_tokens: int, block_size: int, cached: set[bytes]) -> int:
    """Count the tokens that need no prefill: cached blocks at the start, but never the last token."""
    hit = 0
    while hit < (num_tokens - 1) // block_size and hashes[hit] in cached:
        hit += 1
    return hit * block_size


# endregion


# %% 2. The KV cache in int8: a scale for each token and head, written once, applied inside the attention's tile
# region: quantize
def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [..., n] to int8, −127 … 127; return the integers and each row's scale [...]."""
    scales = rows.float().abs().amax(-1) / 127
    nearest = torch.floor(rows / scales.clamp(min=1e-30)[..., None] + 0.5)
    return nearest.to(torch.int8), scales


# endregion


# region: quantize_kernels
@triton.jit
def largest_kernel(rows, largest, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Find the largest magnitude of each row. Grid: (rows,).

    rows [rows, head_dim], any float dtype; largest float32 [rows]. Reads each element once, writes 4 bytes a row.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    numbers = tl.load(rows + row * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    tl.store(largest + row, tl.max(tl.abs(numbers), axis=0))


@triton.jit
def quantize_kernel(rows, integers, scales, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Quantize each row. Grid: (rows,). integers int8 [rows, head_dim]; scales float32 [rows]."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    numbers = tl.load(rows + row * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(numbers), axis=0) / 127
    nearest = tl.floor(numbers / tl.maximum(scale, 1e-30) + 0.5).to(tl.int8)
    tl.store(integers + row * HEAD_DIM + column, nearest, mask=column < HEAD_DIM)
    tl.store(scales + row, scale)


@triton.jit
def quantize_and_cache_kernel(rows, slots, cache, scales, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Quantize rows on the way into the cache. Grid: (tokens, KV heads).

    rows [tokens, heads, head_dim], any float dtype; slots int [tokens], −1 is not written; cache int8 [slots, heads,
    head_dim]; scales float32 [slots, heads]. Reads head_dim elements and writes head_dim + 4 bytes a program.
    """
    # 1. Which key is this program's?
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    # 2. Where does it go? Padding has slot −1, and must not be written.
    slot, column = tl.load(slots + token).to(tl.int64), tl.arange(0, BLOCK_D)
    if slot >= 0:
        # 3. Read each number once, and none of the next head's.
        source = rows + (token * heads + head) * HEAD_DIM + column
        numbers = tl.load(source, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        scale = tl.max(tl.abs(numbers), axis=0) / 127  # 4. The largest magnitude becomes 127.
        # 5. Round to the nearest integer. A row of zeros has scale 0.
        nearest = tl.floor(numbers / tl.maximum(scale, 1e-30) + 0.5).to(tl.int8)
        # 6. Both go to the slot: the integers, and one scale.
        tl.store(cache + (slot * heads + head) * HEAD_DIM + column, nearest, mask=column < HEAD_DIM)
        tl.store(scales + slot * heads + head, scale)


# endregion


@triton.jit
def int8_decode_kernel(
    out, q, keys, values, key_scales, value_scales, block_table, lengths, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Do lesson 02's decode attention over a cache of integers. Grid: (sequences, heads).

    q, out [sequences, heads, head_dim]; keys, values int8 [slots, kv_heads, head_dim]; scales fp32 [slots, kv_heads].
    A token's scale multiplies its score and its weight: once per token, not once per element. Must read
    2 * length * kv_heads * (head_dim + 4) bytes a sequence; does 4 * length * heads * head_dim FLOPs.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, column = tl.load(lengths + sequence), tl.arange(0, BLOCK_D)
    row = (sequence * GROUP * KV_HEADS + head) * HEAD_DIM + column
    query = tl.load(q + row, mask=column < HEAD_DIM, other=0.0).to(tl.float32) * scale
    maximum, total, result = -float("inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        block = tl.load(block_table + sequence * table_width + token // BLOCK_SIZE, mask=token < length, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + head // GROUP
        there = (token < length)[:, None] & (column < HEAD_DIM)[None, :]
        k = tl.load(keys + at[:, None] * HEAD_DIM + column[None, :], mask=there, other=0).to(tl.float32)
        v = tl.load(values + at[:, None] * HEAD_DIM + column[None, :], mask=there, other=0).to(tl.float32)
        k_scale = tl.load(key_scales + at, mask=token < length, other=0.0)
        v_scale = tl.load(value_scales + at, mask=token < length, other=0.0)
        scores = tl.where(token < length, tl.sum(k * query[None, :], axis=1) * k_scale, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights, keep = tl.exp(scores - new_maximum), tl.exp(maximum - new_maximum)
        total = total * keep + tl.sum(weights, axis=0)
        result = result * keep + tl.sum((weights * v_scale)[:, None] * v, axis=0)
        maximum = new_maximum
    tl.store(out + row, result / tl.maximum(total, 1e-30), mask=column < HEAD_DIM)


def quantize_launch(rows: Tensor, slots: Tensor, cache: Tensor, scales: Tensor) -> None:
    """Write rows [tokens, heads, head_dim] into their slots of cache and scales with the kernel."""
    tokens, heads, head_dim = rows.shape
    block = triton.next_power_of_2(head_dim)
    quantize_and_cache_kernel[(tokens, heads)](rows, slots, cache, scales, HEAD_DIM=head_dim, BLOCK_D=block)


def int8_decode(
    q: Tensor, caches: Tensor, scales: Tensor, block_table: Tensor, lengths: Tensor, block_size: int
) -> Tensor:
    """Attend with the kernel: q [sequences, heads, head_dim] over int8 caches [2, slots, kv_heads, head_dim]."""
    out, (heads, head_dim), kv_heads = torch.empty_like(q), q.shape[1:], caches.shape[2]
    int8_decode_kernel[(len(q), heads)](
        out, q, *caches, *scales, block_table, lengths, block_table.shape[1], 1 / math.sqrt(head_dim),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=64,
    )  # fmt: skip
    return out


# %% 3. Weights in eight bits and in four: fewer bytes to read in every step, and room for more cache


@triton.jit
def w8a16_kernel(out, x, weight, scales, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Compute out [M, N] = x [M, K] @ (weight int8 [N, K] * scales float32 [N]).T. Grid: (tiles of M, tiles of N).

    Integers become x's dtype in registers (exact up to 256 even in bfloat16); a row's scale multiplies its results.
    Must read N * K bytes of weights, half of what 16 bits take; does 2 * M * N * K FLOPs.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + row[:, None] * K + inner, mask=(row < M)[:, None] & (inner < K), other=0.0)
        w = tl.load(weight + column[:, None] * K + inner, mask=(column < N)[:, None] & (inner < K), other=0)
        total += tl.dot(a, tl.trans(w.to(a.dtype)), input_precision="ieee")
    total *= tl.load(scales + column, mask=column < N, other=0.0)
    there = (row < M)[:, None] & (column < N)
    tl.store(out + row[:, None] * N + column, total.to(out.dtype.element_ty), mask=there)


def w8a16(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply x [m, k] by int8 weights [n, k] with a scale for each row -> [m, n], with the kernel."""
    (m, k), n = x.shape, len(weight)
    out, tiles = x.new_empty(m, n), {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    w8a16_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 64))](out, x, weight, scales, m, n, k, **tiles)
    return out


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Pack weights [n, k] two codes a byte, uint8 [n, groups * group / 2], with a scale for each group of columns.

    A code is 8 + an integer −7 … 7; the even column is in the low half. The last group is padded with zeros.
    """
    rows = F.pad(weight.float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    scales = rows.abs().amax(-1) / 7
    codes = (torch.floor(rows / scales.clamp(min=1e-30)[..., None] + 0.5) + 8).flatten(1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def dequantize_int4(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Unpack codes and scales to weights [n, columns]."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    rows = (codes.float() - 8).unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return rows.flatten(1)[:, :columns]


def verify_kernels(device: torch.device, tokens: int = 45) -> dict:
    """Compare the int8 cache, written and read by the kernels, and the int8 matmul with float64."""
    new, q = torch.randn(2, 2 * tokens, 2, 80).half(), torch.randn(2, 6, 80).half()
    slots = torch.randperm(96)[: 2 * tokens]
    caches, scales = torch.zeros(2, 96, 2, 80).char().to(device), torch.zeros(2, 96, 2).to(device)
    for rows, cache, scale in zip(new.to(device), caches, scales, strict=True):
        quantize_launch(rows, slots.to(device), cache, scale)
    tables, lengths = slots.view(2, tokens).to(device), torch.tensor([tokens, tokens], device=device)
    out = int8_decode(q.to(device), caches, scales, tables, lengths, block_size=1).cpu()
    k, v = (caches * scales[..., None].double()).cpu()[:, slots].view(2, 2, tokens, 2, 80).transpose(2, 3)
    exact = F.scaled_dot_product_attention(q[:, :, None].double(), k, v, enable_gqa=True)[:, :, 0]
    x, (integers, scale) = torch.randn(5, 200).half(), quantize(torch.randn(70, 200))
    product = w8a16(x.to(device), integers.to(device), scale.to(device)).cpu()
    right = x.double() @ (integers * scale[:, None]).double().T
    relative = (product / right - 1).abs().median().item()
    errors = {"decode over int8": furthest(out, exact), "product with int8": relative}
    show_errors("The kernels", errors, 4e-3)
    return errors


# %% 4. CUDA graphs: one launch instead of hundreds, for the batch sizes that were captured


def padded_size(batch: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest captured size that holds the batch, or None: run it eagerly. `sizes` are in order."""
    place = bisect_left(sizes, batch)
    return sizes[place] if place < len(sizes) else None


class Buffers:
    """The buffers of captured graphs, on a CPU: a replay works on the same rows every time, whatever they hold."""

    def __init__(self, largest: int, cache_slots: int) -> None:
        self.tokens, self.slots, self.out = [0] * largest, [-1] * largest, [0] * largest
        self.cache = [0] * cache_slots

    def replay(self, size: int, tokens: Sequence[int], slots: Sequence[int], pad: bool = True) -> list[int]:
        """Replay the graph of `size` rows: each row writes its token to its slot and outputs ten times the token."""
        count = len(tokens)
        self.tokens[:count], self.slots[:count] = tokens, slots
        if pad:
            self.slots[count:] = [-1] * (len(self.slots) - count)  # rows beyond the batch write nowhere
        for row in range(size):
            if self.slots[row] >= 0:
                self.cache[self.slots[row]] = self.tokens[row]
            self.out[row] = 10 * self.tokens[row]
        return self.out[:count]


# %% 5. Tensor parallelism in miniature: columns, then rows, then one sum


def column_then_row(x: Tensor, columns: Sequence[Tensor], row: Tensor, between: Callable, ranks: int) -> Tensor:
    """Split `columns` [out, in] over the ranks by outputs, and `row` [out, in] by the matching inputs.

    x [tokens, in] is on every rank; `between` takes the outputs of a rank's columns. One sum over the ranks, the
    all-reduce, ends the pair: nothing else is sent.
    """
    partial_sums = []
    for rank in range(ranks):
        outputs = [F.linear(x, weight.chunk(ranks, 0)[rank]) for weight in columns]
        partial_sums.append(F.linear(between(*outputs), row.chunk(ranks, 1)[rank]))
    return torch.stack(partial_sums).sum(0)


# %% 6. Break it: more prefixes than the pool holds; and a salt, which breaks the sharing on purpose


def thrash(llm: LLM, text: Sequence[int], counts: Sequence[int], rounds: int) -> dict:
    """Measure hit rates when shared prefixes of 128 tokens take turns in a pool of 63 blocks."""
    params, rates = SamplingParams(max_tokens=1), {}
    for prefixes in track(counts, "thrashing"):
        llm.reset_prefix_cache()
        before = llm.llm_engine.stats.prefix_cache_stats
        for number in range(prefixes * rounds):
            first, own = 128 * (number % prefixes), 128 * prefixes + 8 * number
            llm.generate([[*text[first : first + 128], *text[own : own + 8]]], params, use_tqdm=False)
        stats = llm.llm_engine.stats.prefix_cache_stats
        rates[str(prefixes)] = (stats.hits - before.hits) / (stats.queries - before.queries)
    report.show_thrashing(rates, rounds)
    return rates


# %% The whole talk


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 05. Optimization catalog", arguments), Control()
    quick, path, group = arguments.quick, arguments.model, arguments.group
    settings = {"device": device.type, "num_gpu_blocks_override": 1500, "max_model_len": 1024}
    llm, without = LLM(path, **settings), LLM(path, enable_prefix_caching=False, **settings)
    model, texts = load_model(path, device, "float32")[0], held_out_tokens(llm, 16, 512)
    stream = [token for text in texts for token in text]
    samples = [text[:256] for text in texts[: 2 if quick else 16]]
    users, rounds = (min(arguments.users, 4), 1) if quick else (arguments.users, 3)
    results = {}
    with control.watch():
        heading("1. Prefix caching")
        results["prefix"] = report.measure_prefixes(llm, without, stream * 4, users, rounds)
        heading("2. The KV cache in int8")
        results["kernels"] = prove(partial(verify_kernels, tokens=17 if quick else 45), device)
        results["kv"] = quantization.measure_cache(llm, path, samples, 128 if quick else 768, device)
        heading("3. Weights in int8 and int4")
        rounding = quantization.Rounding(quantize, quantize_int4, dequantize_int4)
        results["weights"] = quantization.measure_weights(model, samples, group, rounding)
    heading("4. CUDA graphs")
    results["replay"] = report.replay_wrongly(Buffers, padded_size)
    heading("5. Tensor parallelism")
    x, columns, row = torch.tensor([[3.0]]), [torch.tensor([[2.0], [-1.0]])], torch.tensor([[5.0, 4.0]])
    results["parallel"] = {str(n): column_then_row(x, columns, row, F.relu, n).item() for n in (1, 2)}
    console.print(f"The lesson's example on one rank and on two: {results['parallel']}")
    heading("6. Break it")
    narrow = LLM(path, **settings | {"num_gpu_blocks_override": 64, "max_model_len": 512})
    results["thrash"] = thrash(narrow, stream, (2, 10) if quick else (2, 4, 6, 7, 8, 10, 12), 2 if quick else 4)
    results["salt"] = report.measure_salted(narrow, stream[:100])
    report.close(results, control.disturbance())
    keep(__file__, results, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
