"""Lesson 05. The optimization catalog: six levers, each alone, what each multiplies and how each breaks.

Builds the names of prefix caching's blocks, an int8 KV cache and int8 weights with their Triton kernels, int4 weights
in groups, the arithmetic of CUDA graphs, tensor parallelism on two ranks, and drafts looked up in the text itself.
You learn which lever acts on what (prefill, bytes, launches, devices, tokens a step), and so when it buys nothing.

    uv run python vllm/05_optimization_catalog.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/05_optimization_catalog.py --users 16 --drafts 8 --group 64
"""

import argparse
import hashlib
import math
import statistics
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL, CacheConfig, ModelConfig
from minivllm.errors import MinivllmError
from minivllm.kernels.quantized_linear import quantized_linear
from minivllm.lab import palette
from minivllm.lab.cli import lesson_parser, positive_int, run
from minivllm.lab.figures import curves, panels
from minivllm.lab.inside import core_of
from minivllm.lab.lesson import begin, keep
from minivllm.lab.progress import track
from minivllm.lab.proof import furthest, prove, show_errors
from minivllm.lab.quality import RoundedCache, decoder_loss, held_out_tokens, read, rounded_weights
from minivllm.lab.recording import STEP_PARTS, bare_engine, launch_seconds, own_clock, record_run, step_parts
from minivllm.lab.shared_prefixes import WORK, serve
from minivllm.lab.tables import closing, console, heading, table
from minivllm.lab.timing import median_seconds
from minivllm.memory import kv_bytes_per_token
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model
from minivllm.platforms.triton_utils import tl, triton
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.cost_model import RooflineCost, StepShape
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model

LLAMA, H100 = known_model("Llama-3.1-8B"), get_hardware("H100")

# %% 1. The pain: where the time of a step goes


def measure_step(model: str, device: torch.device, batches: Sequence[int], outputs: int) -> dict:
    """Milliseconds of a step by part, for batches of requests that all decode."""
    found = {}
    for batch in track(batches, "timing steps"):
        cache = CacheConfig(num_gpu_blocks=1 + 10 * batch, enable_prefix_caching=False)
        core = bare_engine(model, device, cache, max_model_len=160, max_num_seqs=batch)
        found[str(batch)] = {part: 1e3 * x for part, x in step_parts(core, [(8, outputs)] * batch).items()}
    rows = [(p, *(f"{x[p]:.2f} ({x[p] / sum(x.values()):.0%})" for x in found.values())) for p in STEP_PARTS]
    table("Milliseconds of a step, all decode", ("part", *(f"{batch} at once" for batch in found)), rows)
    return found


# %% 2. Prefix caching: a block's name stands for everything before it


# region: block_hashes
def block_hashes(token_ids: Sequence[int], block_size: int, extra: bytes = b"") -> list[bytes]:
    """The names of the full blocks: H(name of the block before, tokens, extra keys); `extra` in the first block."""
    names, parent = [], bytes(32)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = struct.pack(f"<{block_size}q", *token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + tokens + (b"" if start else extra)).digest()
        names.append(parent)
    return names


def cached_tokens(names: Sequence[bytes], num_tokens: int, block_size: int, cached: set[bytes]) -> int:
    """Tokens that need no prefill: known blocks from the start on. The last token is computed anyway: it is asked."""
    hit = 0
    while hit < (num_tokens - 1) // block_size and names[hit] in cached:
        hit += 1
    return hit * block_size


# endregion


def measure_prefixes(llm: LLM, without: LLM, text: Sequence[int], users: int) -> dict:
    """Each kind of work with the cache and without: hit rate in tokens, and how much sooner the first token comes."""
    found, rows = {}, []
    for name, work in track(WORK.items(), "sharing prefixes"):
        runs = [[serve(one, work, text, users) for one in (llm, without)] for _ in range(3)]
        sooner = statistics.median(off.first_token_seconds / on.first_token_seconds for on, off in runs)
        on, off = runs[0]
        hit, same = on.hits / on.queries, statistics.mean(a == b for a, b in zip(on.answers, off.answers, strict=True))
        found[name] = {"tokens": on.queries, "skipped": on.hits, "hit": hit, "sooner": sooner, "same": same}
        rows.append((name, f"{on.queries:,}", f"{on.hits:,}", f"{hit:.1%}", f"{sooner:.1f} ×", f"{same:.0%}"))
    columns = ("work", "prompt tokens", "not computed", "hit rate", "first token sooner", "same answers")
    table(f"Prefix caching, {users} users", columns, rows)
    return found


# %% 3. The KV cache in int8: a scale for each token and head, written once, applied inside the attention's tile


# region: quantize
def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., n] as integers −127 … 127, int8, and the scale [...] of each row that makes them numbers again."""
    scales = rows.float().abs().amax(-1) / 127
    nearest = torch.floor(rows / scales.clamp(min=1e-30)[..., None] + 0.5)
    return nearest.to(torch.int8), scales


# endregion


@triton.jit
def quantize_kernel(rows, slots, cache, scales, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`quantize` on the way into the cache. Grid: (tokens, KV heads).

    rows [tokens, heads, head_dim], any float dtype; slots int [tokens], −1 is not written; cache int8 [slots, heads,
    head_dim]; scales float32 [slots, heads]. Reads head_dim elements and writes head_dim + 4 bytes a program.
    """
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot, column = tl.load(slots + token).to(tl.int64), tl.arange(0, BLOCK_D)
    if slot >= 0:
        row = tl.load(rows + (token * heads + head) * HEAD_DIM + column, mask=column < HEAD_DIM, other=0.0)
        scale = tl.max(tl.abs(row.to(tl.float32)), axis=0) / 127
        nearest = tl.floor(row.to(tl.float32) / tl.maximum(scale, 1e-30) + 0.5).to(tl.int8)
        tl.store(cache + (slot * heads + head) * HEAD_DIM + column, nearest, mask=column < HEAD_DIM)
        tl.store(scales + slot * heads + head, scale)


# region: int8_decode_kernel
@triton.jit
def int8_decode_kernel(
    out, q, keys, values, key_scales, value_scales, block_table, lengths, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Lesson 02's decode attention over a cache of integers. Grid: (sequences, heads).

    q, out [sequences, heads, head_dim]; keys, values int8 [slots, kv_heads, head_dim]; scales fp32 [slots, kv_heads].
    A token's scale multiplies its score and its weight: one product a token, not one an element. Must read
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


# endregion


def quantize_launch(rows: Tensor, slots: Tensor, cache: Tensor, scales: Tensor) -> None:
    """Write rows [tokens, heads, head_dim] into their slots of cache and scales, by the kernel."""
    tokens, heads, head_dim = rows.shape
    block = triton.next_power_of_2(head_dim)
    quantize_kernel[(tokens, heads)](rows, slots, cache, scales, HEAD_DIM=head_dim, BLOCK_D=block)


def int8_decode(
    q: Tensor, caches: Tensor, scales: Tensor, block_table: Tensor, lengths: Tensor, block_size: int
) -> Tensor:
    """Attention of q [sequences, heads, head_dim] over int8 caches [2, slots, kv_heads, head_dim], by the kernel."""
    out, (heads, head_dim), kv_heads = torch.empty_like(q), q.shape[1:], caches.shape[2]
    int8_decode_kernel[(len(q), heads)](
        out, q, *caches, *scales, block_table, lengths, block_table.shape[1], 1 / math.sqrt(head_dim),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=64,
    )  # fmt: skip
    return out


def per_token_and_head(x: Tensor) -> Tensor:
    """Keys or values [tokens, heads, head_dim] as an int8 cache gives them back."""
    integers, scales = quantize(x)
    return integers * scales[..., None]


def per_tensor(x: Tensor) -> Tensor:
    """The same with a single scale for all of them."""
    return per_token_and_head(x.reshape(1, 1, -1)).view_as(x)


def measure_cache(llm: LLM, model: str, texts: list[list[int]], context: int, device: torch.device) -> dict:
    """The engine's int8 cache: bytes of a token, loss and agreement on held-out text, and the time of a decode step."""
    kinds, here = ("float32", "bfloat16", "fp8", "int8"), llm.llm_engine.model_config
    sizes = {k: {"here": kv_bytes_per_token(here, k), "llama": kv_bytes_per_token(LLAMA, k)} for k in kinds}
    fits = {k: sizes["bfloat16"]["llama"] / sizes[k]["llama"] for k in kinds}
    settings = {"device": device.type, "num_gpu_blocks_override": 300, "max_model_len": 1024}
    full, quantized = read(llm, texts), read(LLM(model, kv_cache_dtype="int8", **settings), texts)
    added, agreement = quantized.loss - full.loss, quantized.agreement(full)
    pool = CacheConfig(num_gpu_blocks=1 + 8 * (context // 16 + 2), enable_prefix_caching=False)

    def step_seconds(kind: str) -> float:
        core = bare_engine(model, device, pool, kv_cache_dtype=kind, max_model_len=context + 32)
        return record_run(core, [(context, 24)] * 8).decode_seconds

    faster = step_seconds("auto") / step_seconds("int8")
    caption = (
        f"read by the engine: loss {full.loss:.4f}, in int8 {added:+.4f}, same favourite token at {agreement:.1%}; "
        f"a decode step of 8 requests at {context} tokens is {faster:.2f} × as fast"
    )
    rows = [(k, *(f"{size:,}" for size in sizes[k].values()), f"{fits[k]:.2f} ×") for k in kinds]
    table("Bytes of a token", ("KV cache", "this model", "Llama-3.1-8B", "fits, of bfloat16"), rows, caption)
    shapes = {str(tokens): StepShape.of([(1, tokens)] * 8) for tokens in (512, 4096, 20480)}
    wide, slim = (RooflineCost.of(LLAMA, H100, kv_dtype=kind) for kind in ("bfloat16", "fp8"))
    modelled = {tokens: wide.seconds(shape) / slim.seconds(shape) for tokens, shape in shapes.items()}
    gains = ", ".join(f"{gain:.2f} × with {int(tokens):,}" for tokens, gain in modelled.items())
    console.print(f"fp8 for Llama-3.1-8B on an H100, 8 requests, a decode step (modelled): {gains} tokens each")
    return {"bytes": sizes, "capacity": fits, "loss": full.loss, "added": added, "agreement": agreement,
            "faster": faster, "context": context, "modelled": modelled}  # fmt: skip


def measure_outlier(model: Decoder, texts: list[list[int]]) -> dict:
    """Loss that an int8 cache adds, by how far a scale reaches: as the model is, and with one channel × 50."""
    ways = {"a scale a token and head": per_token_and_head, "a scale a tensor": per_tensor}
    plain, lengths, found = decoder_loss(model, texts), [len(one) for one in texts], {}
    for name, rounded in ways.items():
        caches = {str(size): RoundedCache(model.config, lengths, rounded, size) for size in (1, 50)}
        found[name] = {size: decoder_loss(model, texts, cache) - plain for size, cache in caches.items()}
    rows = [(name, *(f"{value:+.4f}" for value in one.values())) for name, one in found.items()]
    table("Loss that an int8 cache adds", ("", "as it is", "one channel × 50"), rows)
    return found


# %% 4. Weights in eight bits and in four: fewer bytes to read in every step, and room for more cache


@triton.jit
def w8a16_kernel(out, x, weight, scales, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out [M, N] = x [M, K] @ (weight int8 [N, K] * scales float32 [N]).T. Grid: (tiles of M, tiles of N).

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
    """x [m, k] times int8 weights [n, k] with a scale for each row -> [m, n], by the kernel."""
    (m, k), n = x.shape, len(weight)
    out, tiles = x.new_empty(m, n), {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64}
    w8a16_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 64))](out, x, weight, scales, m, n, k, **tiles)
    return out


# region: int4
def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Weights [n, k] as two codes a byte, uint8 [n, groups * group / 2], and a scale for each group of columns.

    A code is 8 + an integer −7 … 7; the even column is in the low half. The last group is filled up with zeros.
    """
    rows = F.pad(weight.float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    scales = rows.abs().amax(-1) / 7
    codes = (torch.floor(rows / scales.clamp(min=1e-30)[..., None] + 0.5) + 8).flatten(1).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def dequantize_int4(packed: Tensor, scales: Tensor, columns: int) -> Tensor:
    """The weights [n, columns] that packed codes and scales stand for."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    rows = (codes.float() - 8).unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return rows.flatten(1)[:, :columns]


# endregion


def stored(weight: Tensor, group: int | None) -> tuple[Tensor, float]:
    """What weights [n, k] become in int4 groups (None: in int8, a scale a row), and bits a weight, scales in 16."""
    if group is None:
        integers, scales = quantize(weight)
        return integers * scales[:, None], 8 + 16 / weight.shape[1]
    packed, scales = quantize_int4(weight, min(group, weight.shape[1]))
    return dequantize_int4(packed, scales, weight.shape[1]), (8 * packed.numel() + 16 * scales.numel()) / weight.numel()


def measure_weights(model: Decoder, texts: list[list[int]], group: int) -> dict:
    """Bits, error and loss of all layers' weights, in int8, and in int4 by the size of its groups."""
    ways: dict = {"int8, a scale a row": None, "int4, a scale a row": 1 << 20}
    ways |= {f"int4, groups of {size}": size for size in sorted({16, 128, group}, reverse=True)}
    base, shape, found, rows = decoder_loss(model, texts), model.layers[0].mlp.gate_up_proj.weight, {}, []
    for name, size in track(ways.items(), "rounding weights"):
        found[name] = {"bits": stored(shape, size)[1]}
        for outlier in (1, 50):
            with rounded_weights(model, lambda weight, size=size: stored(weight, size)[0], outlier) as error:
                found[name] |= {f"error_{outlier}": error, f"added_{outlier}": decoder_loss(model, texts) - base}
        bits, error, added, _, worse = found[name].values()
        rows.append((name, f"{bits:.2f}", f"{error:.1%}", f"{added:+.4f}", f"{worse:+.4f}"))
    x, weight = torch.randn(1, 2048), torch.randn(2048, 2048)
    integers, scales = quantize(weight)
    first = median_seconds(lambda: x @ (integers * scales[:, None]).T)
    inside = median_seconds(lambda: quantized_linear(x, integers, scales[:, None]))
    plain = median_seconds(lambda: x @ weight.T)
    caption = (
        f"one row times 2,048² int8 weights on a CPU, of float32's time: {first / plain:.1f} × if dequantized first, "
        f"{inside / plain:.2f} × by the engine, which unpacks inside the product"
    )
    columns = ("stored as", "bits", "error", "loss added", "one channel × 50")
    table(f"Weights of the layers (loss {base:.4f})", columns, rows, caption)
    return {"ways": found, "loss": base, "slower": first / plain, "unpacked_inside": inside / plain}


def verify_kernels(device: torch.device) -> dict:
    """The int8 cache, written and read by the kernels, and the product with int8, against float64."""
    new, q, slots = torch.randn(2, 90, 2, 80).half(), torch.randn(2, 6, 80).half(), torch.randperm(96)[:90]
    caches, scales = torch.zeros(2, 96, 2, 80).char().to(device), torch.zeros(2, 96, 2).to(device)
    for rows, cache, scale in zip(new.to(device), caches, scales, strict=True):
        quantize_launch(rows, slots.to(device), cache, scale)
    tables, lengths = slots.view(2, 45).to(device), torch.tensor([45, 45], device=device)
    out = int8_decode(q.to(device), caches, scales, tables, lengths, block_size=1).cpu()
    k, v = (caches * scales[..., None].double()).cpu()[:, slots].view(2, 2, 45, 2, 80).transpose(2, 3)
    exact = F.scaled_dot_product_attention(q[:, :, None].double(), k, v, enable_gqa=True)[:, :, 0]
    x, (integers, scale) = torch.randn(5, 200).half(), quantize(torch.randn(70, 200))
    product = w8a16(x.to(device), integers.to(device), scale.to(device)).cpu()
    right = x.double() @ (integers * scale[:, None]).double().T
    relative = (product / right - 1).abs().median().item()
    errors = {"decode over int8": furthest(out, exact), "product with int8": relative}
    show_errors("The kernels", errors, 4e-3)
    return errors


# %% 5. CUDA graphs: one launch instead of hundreds

LAUNCHES = ("norm", "qkv", "rotate", "write cache", "attention", "o", "norm", "gate and up", "silu", "down")


# region: graphs
def padded_size(batch: int, sizes: Sequence[int]) -> int | None:
    """The smallest captured size that holds the batch; None, run it eagerly, where none does. `sizes` are in order."""
    place = bisect_left(sizes, batch)
    return sizes[place] if place < len(sizes) else None


def graph_gain(launches: int, launch: float, host: float, gpu: float) -> float:
    """Step without a graph over step with one, from seconds: of a launch, of the host around the step, of the GPU.

    The host launches while the GPU computes, so the slower decides; at most (launches * launch + host) / gpu.
    """
    return (max(launches * launch, gpu) + host) / (max(launch, gpu) + host)


class Buffers:
    """What replays work on: the same rows every time, whatever lies in them. A CPU's stand-in for captured graphs."""

    def __init__(self, largest: int, cache_slots: int) -> None:
        self.tokens, self.slots, self.out = [0] * largest, [-1] * largest, [0] * largest
        self.cache = [0] * cache_slots

    def replay(self, size: int, tokens: Sequence[int], slots: Sequence[int], pad: bool = True) -> list[int]:
        """A step by the graph of `size` rows: each row writes its token to its slot and puts ten times it out."""
        count = len(tokens)
        self.tokens[:count], self.slots[:count] = tokens, slots
        if pad:
            self.slots[count:] = [-1] * (len(self.slots) - count)  # rows beyond the batch write nowhere
        for row in range(size):
            if self.slots[row] >= 0:
                self.cache[self.slots[row]] = self.tokens[row]
            self.out[row] = 10 * self.tokens[row]
        return self.out[:count]


# endregion


def measure_graphs(step: dict[str, float]) -> dict:
    """The gain that graphs would bring on an H100, with the host's times of this machine."""
    launch, host = launch_seconds(), 1e-3 * sum(step[part] for part in step if part not in ("forward", "sample_tokens"))
    found: dict = {"launch_us": 1e6 * launch, "host_ms": 1e3 * host, "gain": {}}
    for name in ("Qwen3-0.6B", "Llama-3.2-3B", "Llama-3.1-8B"):
        config = known_model(name)
        cost, launches = RooflineCost.of(config, H100), len(LAUNCHES) * config.num_hidden_layers + 4
        gpu = {batch: cost.floor_seconds(StepShape.of([(1, 1024)] * batch)) / 0.9 for batch in (1, 8, 64, 256)}
        found["gain"][name] = {str(batch): graph_gain(launches, launch, host, one) for batch, one in gpu.items()}
    rows = [(name, *(f"{gain:.2f} ×" for gain in gains.values())) for name, gains in found["gain"].items()]
    caption = f"modelled, with {1e6 * launch:.0f} µs a launch and {1e3 * host:.2f} ms around a step measured here"
    table("Gain of graphs on an H100, by requests decoding at 1,024 tokens", ("", "1", "8", "64", "256"), rows, caption)
    return found


def replay_wrongly() -> dict:
    """A replay without padding, and one of a graph that is too small: what stands in the cache, and what comes out."""
    found = {}
    for name, pad in (("padded", True), ("not padded", False)):
        buffers = Buffers(8, 16)
        buffers.replay(4, [1, 2, 3, 4], [10, 11, 12, 13])
        buffers.cache[13] = 99  # the fourth request has left; its slot belongs to somebody else
        buffers.replay(4, [5, 6, 7], [10, 11, 12], pad)
        found[name] = buffers.cache[13]
    buffers = Buffers(8, 16)
    buffers.replay(8, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    found |= {"right": [60, 70, 80, 90, 110], "too small": buffers.replay(4, [6, 7, 8, 9, 11], [1, 2, 3, 4, 5])}
    after = f"somebody else's 99 is then {found['padded']} if the rest is padded, {found['not padded']} if not"
    console.print(f"A graph of 4 rows replayed for 3 requests: {after}.")
    console.print(f"Replayed for 5: out come {found['too small']}, and right is {found['right']}.")
    return found


# %% 6. Tensor parallelism in miniature: columns, then rows, then one sum


# region: tensor_parallel
def column_then_row(x: Tensor, columns: Sequence[Tensor], row: Tensor, between: Callable, ranks: int) -> Tensor:
    """Each rank has a share of the outputs of `columns` [out, in], and the inputs of `row` [out, in] that match it.

    x [tokens, in] is on every rank; `between` takes what a rank's columns gave. One sum over the ranks, the all-reduce,
    ends the pair: nothing else is sent.
    """
    partial = []
    for rank in range(ranks):
        given = [F.linear(x, weight.chunk(ranks, 0)[rank]) for weight in columns]
        partial.append(F.linear(between(*given), row.chunk(ranks, 1)[rank]))
    return torch.stack(partial).sum(0)


def all_reduce_bytes(tokens: int, hidden: int, layers: int, ranks: int, element: int = 2) -> float:
    """Bytes that each GPU sends in a step: twice a layer, 2 (ranks − 1) / ranks of the hidden states (ring)."""
    return 2 * layers * 2 * (ranks - 1) / ranks * tokens * hidden * element


# endregion


@torch.inference_mode()
def measure_parallel(model: Decoder) -> dict:
    """One layer's two halves on one rank and on two; what GPUs would send for Llama-3-70B."""
    config, layer = model.config, model.layers[0]
    x, attend = torch.randn(24, config.hidden_size).to(layer.mlp.down_proj.weight), CausalAttention(config)
    shares = [count * config.head_dim for count in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]

    def heads(*qkv: Tensor) -> Tensor:
        return attend(0, *(part.unflatten(1, (-1, config.head_dim)) for part in qkv)).flatten(1)

    halves = {
        "attention": (layer.self_attn.qkv_proj.weight.split(shares), layer.self_attn.o_proj.weight, heads),
        "mlp": (layer.mlp.gate_up_proj.weight.chunk(2), layer.mlp.down_proj.weight, lambda g, u: F.silu(g) * u),
    }
    off = {n: (column_then_row(x, *h, 1) - column_then_row(x, *h, 2)).abs().max().item() for n, h in halves.items()}
    large, counts = known_model("Meta-Llama-3-70B"), (64, 8192)
    shape = large.hidden_size, large.num_hidden_layers
    sent = {str(ranks): {str(n): all_reduce_bytes(n, *shape, ranks) for n in counts} for ranks in (2, 4, 8)}
    rows = [(ranks, *(f"{count / 1e6:,.0f} MB" for count in one.values())) for ranks, one in sent.items()]
    caption = "two ranks are off one by " + ", ".join(f"{error:.0e} ({name})" for name, error in off.items())
    table("Llama-3-70B: each GPU sends, in a step of", ("GPUs", "64 tokens", "8,192 tokens"), rows, caption)
    return {"off": max(off.values()), "sent": sent}


# %% 7. A first look at speculation: the text itself proposes, one forward pass verifies


# region: speculate
def propose(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to `count` drafts: what followed the last n tokens where they first occurred, n from `longest` down to 1."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return list(tokens[start + n : start + n + count])
    return []


def verify(drafts: Sequence[int], favourites: Sequence[int]) -> list[int]:
    """New tokens of a forward pass; `favourites` are the model's after the last known token and after each draft.

    Drafts count as long as they are what the model says itself; then comes its own word, so there always is a new one.
    """
    kept = 0
    while kept < len(drafts) and drafts[kept] == favourites[kept]:
        kept += 1
    return list(favourites[: kept + 1])


def generate(model: Decoder, prompt: list[int], count: int, drafts: int) -> tuple[list[int], int]:
    """`count` greedy tokens, with up to `drafts` drafts a forward pass (0: plain), and the passes. No KV cache here."""
    text, passes, attention = list(prompt), 0, CausalAttention(model.config)
    while len(text) < len(prompt) + count:
        proposed = propose(text, 3, drafts) if drafts else []
        ids = torch.tensor(text + proposed, device=model.lm_head.weight.device)
        hidden = model(ids, torch.arange(len(ids), device=ids.device), attention)[len(text) - 1 :]
        text += verify(proposed, model.compute_logits(hidden).argmax(-1).tolist())
        passes += 1
    return text[len(prompt) : len(prompt) + count], passes


# endregion


def measure_speculation(model: Decoder, path: str, texts: list[list[int]], drafts: int, count: int) -> dict:
    """The lesson's loop on a prompt; then the engine on all, one by one and at once, beside itself without drafts."""
    settings = {"device": model.lm_head.weight.device.type, "enable_prefix_caching": False,
                "num_gpu_blocks_override": 600, "max_model_len": 512, "skip_tokenizer_init": True}  # fmt: skip
    speculative = {"num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    plain, guess = LLM(path, **settings), LLM(path, **settings, speculative_config=speculative)
    params, clock = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True), own_clock(core_of(plain))

    def timed(llm: LLM, prompts: list[list[int]], batch: int) -> tuple[float, list]:
        """Seconds, and the tokens that came out."""
        start, said = clock(), []
        for first in range(0, len(prompts), batch):
            said += llm.generate(prompts[first : first + batch], params, use_tqdm=False)
        return clock() - start, [one.outputs[0].token_ids for one in said]

    found: dict = {}
    kinds = {"repeats itself": [one[:48] * 3 for one in texts], "fresh": [one[:144] for one in texts]}
    for kind, prompts in track(kinds.items(), "speculating"):
        with torch.inference_mode():
            alone, spoken = (generate(model, prompts[0], 24, number) for number in (0, drafts))
        one = found[kind] = {
            "lesson_same": alone[0] == spoken[0],
            "lesson_passes": spoken[1],
            "faster": {},
            "same": True,
        }
        for batch in (1, len(texts)):
            turns = [[timed(llm, prompts, batch) for llm in (plain, guess)] for _ in range(2)]
            (slow, expected), (fast, _) = (min(runs) for runs in zip(*turns, strict=True))
            one["faster"][str(batch)] = slow / fast
            one["same"] &= all(tokens == expected for turn in turns for _, tokens in turn)
            stats = guess.llm_engine.stats.spec_decoding_stats
            made, right = 2 * len(texts) * count, stats.num_accepted_tokens
            one |= {"accepted": right / stats.num_draft_tokens, "a_pass": made / (made - right)}
    rows = []
    for kind, one in found.items():
        gains = (f"{gain:.2f} ×" for gain in one["faster"].values())
        rows.append((kind, one["same"], f"{one['accepted']:.0%}", f"{one['a_pass']:.2f}", *gains))
    columns = ("text", "same tokens", "drafts right", "tokens a pass", "as fast alone", f"{len(texts)} at once")
    table(f"The engine with up to {drafts} drafts", columns, rows)
    return found


# %% 8. Break it: more prefixes than the pool holds; and a salt, which breaks the sharing on purpose


def thrash(llm: LLM, text: Sequence[int], rounds: int) -> dict:
    """Hit rates when so many shared prefixes of 128 tokens come in turn to a pool of 63 blocks."""
    params, found = SamplingParams(max_tokens=1), {}
    for prefixes in track((2, 4, 6, 7, 8, 10, 12), "thrashing"):
        llm.reset_prefix_cache()
        before = llm.llm_engine.stats.prefix_cache_stats
        for number in range(prefixes * rounds):
            first, own = 128 * (number % prefixes), 128 * prefixes + 8 * number
            llm.generate([[*text[first : first + 128], *text[own : own + 8]]], params, use_tqdm=False)
        stats = llm.llm_engine.stats.prefix_cache_stats
        found[str(prefixes)] = (stats.hits - before.hits) / (stats.queries - before.queries)
    title = f"A pool of 63 blocks, and prefixes of 8 blocks that come in turn, {rounds} times"
    table(title, ("prefixes", *found), [("hit rate", *(f"{hit:.0%}" for hit in found.values()))])
    return found


def salted(llm: LLM, prompt: list[int]) -> dict:
    """Tokens of the same prompt that are found in the cache, by users with salts, one after the other."""
    found, params = {}, SamplingParams(max_tokens=1)
    llm.reset_prefix_cache()
    for who, salt in (("Ann", "a"), ("Bob", "b"), ("Ann again", "a")):
        asked = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, params, use_tqdm=False)
        found[who] = asked[0].num_cached_tokens
    table(f"Found in the cache, of the same {len(prompt)} tokens", list(found), [list(found.values())])
    return found


# %% The talk, in order


def draw(found: dict, path: str) -> None:
    """Hit rates when prefixes outgrow the pool; loss by bits of the weights; gain of graphs by batch."""
    with panels(path, 3) as (left, middle, right):
        curves(left, {"hits": found["thrash"]}, factor=100)
        left.set(title="Prefixes outgrow the pool", xlabel="prefixes of 8 blocks, pool of 63", ylabel="% hits", ylim=-2)
        for (name, one), colour in zip(found["weights"]["ways"].items(), palette.SERIES, strict=False):
            middle.plot(one["bits"], one["added_1"], "o", color=colour, label=name)
            middle.plot(one["bits"], one["added_50"], "x", color=colour)
        middle.set(title="Weights (×: outlier channel)", xlabel="bits a weight", ylabel="loss added, nats a token")
        middle.legend(fontsize=8)
        curves(right, found["graphs"]["gain"], octaves=True)
        right.set(title="Graphs on an H100 (modelled)", xlabel="requests", ylabel="× as fast", ylim=0)


def main(arguments: argparse.Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, quick, path = begin("Lesson 05. Optimization catalog", arguments), arguments.quick, arguments.model
    ModelConfig.from_pretrained(path)  # says at once that there is none
    if arguments.group % 2 or not 2 <= arguments.users <= 32 or arguments.drafts > 32:
        raise MinivllmError("--group is an even number, --users is 2 to 32 and --drafts at most 32")
    settings = {"device": device.type, "max_model_len": 1024}
    llm = LLM(path, num_gpu_blocks_override=1500, **settings)
    without = LLM(path, num_gpu_blocks_override=1500, enable_prefix_caching=False, **settings)
    texts = held_out_tokens(llm, 16, 512)
    text, some = [token for one in texts for token in one], [one[:256] for one in texts[: 4 if quick else 16]]
    heading("1. Where the time of a step goes")
    found: dict = {"step": measure_step(path, device, (1, 8) if quick else (1, 8, 64), 16 if quick else 48)}
    heading("2. Prefix caching")
    found["prefix"] = measure_prefixes(llm, without, text * 4, min(arguments.users, 4) if quick else arguments.users)
    heading("3. The KV cache in int8")
    model = load_model(path, device, "float32")[0]
    found["kernels"] = prove(verify_kernels, device)
    found["kv"] = measure_cache(llm, path, some, 128 if quick else 768, device)
    found["outlier"] = measure_outlier(model, some)
    heading("4. Weights in int8 and int4")
    found["weights"] = measure_weights(model, some, arguments.group)
    heading("5. CUDA graphs")
    found |= {"graphs": measure_graphs(next(iter(found["step"].values()))), "replay": replay_wrongly()}
    heading("6. Tensor parallelism")
    found["parallel"] = measure_parallel(model)
    heading("7. Speculation")
    work = (texts[:4], arguments.drafts, 24) if quick else (texts, arguments.drafts, 48)
    found["speculation"] = measure_speculation(model, path, *work)
    heading("8. Break it")
    narrow = LLM(path, num_gpu_blocks_override=64, **{**settings, "max_model_len": 512})
    found |= {"thrash": thrash(narrow, text, 2 if quick else 4), "salt": salted(narrow, text[:100])}
    prefix, kv, fresh = found["prefix"], found["kv"], found["speculation"]["fresh"]
    closing(
        f"The prefix cache spared {prefix['an agent']['hit']:.0%} of an agent's prefill, "
        f"{prefix['one system prompt']['hit']:.0%} of users behind one instruction, and of strangers' "
        f"{prefix['strangers']['hit']:.0%}.",
        f"An int8 cache holds {kv['capacity']['int8']:.2f} times Llama-3.1-8B's tokens and added {kv['added']:+.4f} to "
        f"the loss; int4 weights without groups, with one outlier channel, added "
        f"{found['weights']['ways']['int4, a scale a row']['added_50']:+.2f}.",
        f"Drafts from the text itself, {fresh['accepted']:.0%} of them right, changed no token of fresh text: "
        + ", ".join(f"{gain:.2f} × as fast with {batch} at once" for batch, gain in fresh["faster"].items()) + ".",
    )  # fmt: skip
    keep(__file__, found, arguments, draw)


def parser() -> argparse.ArgumentParser:
    """The lesson's own knobs, beside those that every lesson has."""
    flags = lesson_parser(__doc__, EMBEDDED_MODEL)
    flags.add_argument("--users", type=positive_int, default=8, help="who share prefixes (default: 8; quick: 4)")
    flags.add_argument("--drafts", type=positive_int, default=4, help="most drafts in a step (default: 4)")
    flags.add_argument("--group", type=positive_int, default=64, help="weights that share an int4 scale (default: 64)")
    return flags


if __name__ == "__main__":
    run(main, parser())
