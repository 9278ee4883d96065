"""Lesson 03. FlashAttention: a softmax over scores that are never stored.

Builds attention with its T × T matrix, the online softmax that does without, the tiled loop, and a Triton kernel.
You learn why a row can be normalised before it is all there, what that saves (memory grows with T, traffic still
with T²), and why two partial results merge exactly: the algebra of split-KV decoding.

    uv run python vllm/03_flash_attention.py                # under a minute on a laptop, no GPU needed
    uv run python vllm/03_flash_attention.py --head-dim 128 --on-chip-kib 100
    uv run python vllm/03_flash_attention.py --budget-mib 2048 --block-q 32 --block-k 32
"""
# ruff: noqa: E741 (m, l and O are the paper's letters)

import argparse
import math
import tracemalloc
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Encoding
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.kernels.unified_attention import unified_attention
from minivllm.lab import palette
from minivllm.lab.aot import SHARED_MEMORY, compile_for
from minivllm.lab.cli import lesson_parser, positive_int, run
from minivllm.lab.figures import panels
from minivllm.lab.lesson import begin, keep
from minivllm.lab.progress import track
from minivllm.lab.proof import furthest, prove, show_errors
from minivllm.lab.results import write_json
from minivllm.lab.slow_memory import in_slow_memory
from minivllm.lab.tables import closing, console, heading, table
from minivllm.lab.timing import median_seconds
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.allocator import keep_freed_memory
from minivllm.platforms.device import device_name
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED, tl, triton
from minivllm.simulate.attention_traffic import (
    exponent,
    flash_traffic,
    largest_block_q,
    least_traffic,
    longest_naive,
    naive_traffic,
)  # fmt: skip

MIB = 2**20

# %% 1. The pain: a matrix of T × T


# region: naive
def stable_softmax(scores: np.ndarray) -> np.ndarray:
    """The softmax of each row, its maximum taken off first, so that no exponential exceeds 1."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def masked(scores: np.ndarray, rows: np.ndarray, first_key: int = 0) -> np.ndarray:
    """The scores of query positions `rows` against the keys from `first_key` on; -inf where the key lies ahead."""
    ahead = first_key + np.arange(scores.shape[1]) > rows[:, None]
    return np.where(ahead, scores.dtype.type(-np.inf), scores)


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one head with stored scores. Every `[:]` is a trip to memory or back.

    q, k, v [T, head_dim] -> [T, head_dim].
    """
    scores = np.empty_like(q, shape=(len(q), len(k)))
    weights, out = np.empty_like(scores), np.empty_like(q)
    scores[:] = masked(q[:] @ k[:].T / math.sqrt(q.shape[1]), np.arange(len(q)))
    weights[:] = stable_softmax(scores[:])
    out[:] = weights[:] @ v[:]
    return out


# endregion


def run_out_of_memory(heads: int, budget: int) -> dict:
    """Double the sequence until its float32 scores and weights exceed `budget` bytes. Counted: nothing is allocated."""
    longest, length, rows = longest_naive(budget, heads, 4), 512, []
    while (needed := heads * naive_traffic(length, 1, 4).extra) <= budget:
        rows.append((f"{length:,}", f"{needed / MIB:,.0f}"))
        length *= 2
    table(f"{heads} heads, float32", ("tokens", "scores and weights, MiB"), [*rows, (f"{length:,}", "refused")])
    lack = f"{length:,} tokens need {needed / MIB:,.0f} MiB and there are {budget / MIB:,.0f}"
    console.print(f"It refuses: {lack}: {longest:,} tokens fit")
    return {"refused_at": length, "longest": longest}


# %% 2. The softmax wants its maximum, and the maximum is known only at the end of the row


# The largest score whose exponential each dtype can hold.
LIMITS = {dtype.__name__: math.log(float(np.finfo(dtype).max)) for dtype in (np.float16, np.float32)}


def overflow() -> dict:
    """The softmax of a score just under and just over each dtype's limit, without the shift and with it."""
    rows = []
    for dtype, limit in LIMITS.items():
        for score in (limit - 0.1, limit + 0.1):
            row = np.array([[0.0, score]], dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                plain = np.exp(row[0, 1]) / np.exp(row).sum()
            rows.append((dtype, f"{score:.1f}", plain, stable_softmax(row)[0, 1]))
    table("Softmax of 0 and x: the weight of x", ("dtype", "x", "exp(x) as it is", "maximum off first"), rows)
    return LIMITS


# %% 3. The idea: keep a running maximum, and rescale what was summed under the old one


# region: partial
class Partial(NamedTuple):
    """Attention of some queries over some of their keys, not yet divided."""

    m: np.ndarray
    """[rows] the largest score."""
    l: np.ndarray
    """[rows] the sum of exp(score - m)."""
    o: np.ndarray
    """[rows, head_dim] the sum of exp(score - m) × value."""


def nothing_seen(rows: int, head_dim: int) -> Partial:
    """Attention over no key at all."""
    return Partial(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, head_dim)))


# endregion


# region: softmax_step
def softmax_step(state: Partial, scores: np.ndarray, values: np.ndarray) -> Partial:
    """The state after one more tile. scores [rows, keys], -inf where masked; values [keys, head_dim]."""
    m = np.maximum(state.m, scores.max(axis=1))
    safe = np.where(np.isneginf(m), 0.0, m)  # a row that has seen no key: -inf - -inf is not a number
    weights = np.exp(scores - safe[:, None])
    keep = np.exp(state.m - safe)
    l = keep * state.l + weights.sum(axis=1)
    o = keep[:, None] * state.o + weights @ values
    return Partial(m, l, o)


# endregion


# region: finish
def finish(state: Partial) -> tuple[np.ndarray, np.ndarray]:
    """(output [rows, head_dim], logarithm of each row's sum [rows]); a row without keys gives 0 and -inf."""
    l = np.maximum(state.l, 1.0)  # exact: the key with the largest score adds exp(0) = 1
    return state.o / l[..., None], state.m + np.log(l)


# endregion

# %% 4. The same algebra merges two halves


# region: merge
def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both. A finished result is a Partial too: m = its logarithm, l = 1, o = the output."""
    m = np.maximum(a.m, b.m)
    safe = np.where(np.isneginf(m), 0.0, m)
    of_a, of_b = np.exp(a.m - safe), np.exp(b.m - safe)
    return Partial(m, of_a * a.l + of_b * b.l, of_a[..., None] * a.o + of_b[..., None] * b.o)


# endregion

# %% 5. Tiles: no array is as long as the sequence in both directions


# region: tiled
def tiled_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, block_q: int, block_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of one head, a tile of queries at a time, each over its tiles of keys.

    q, k, v [T, head_dim] -> (output [T, head_dim], logarithm of each row's sum [T], float32).
    """
    out, lse = np.empty_like(q), np.empty_like(q, shape=len(q), dtype=np.float32)
    for start in range(0, len(q), block_q):
        tile = q[start : start + block_q] / math.sqrt(q.shape[1])
        rows = start + np.arange(len(tile))
        state = nothing_seen(*tile.shape)
        for first in range(0, rows[-1] + 1, block_k):  # what lies beyond, no row of this tile sees
            scores = tile @ k[first : first + block_k].T
            state = softmax_step(state, masked(scores, rows, first), v[first : first + block_k])
        out[start : start + block_q], lse[start : start + block_q] = finish(state)
    return out, lse


# endregion

# %% 6. The kernel


# region: flash_kernel
@triton.jit
def flash_kernel(
    out, lse, q, k, v, queries, keys, scale, CAUSAL: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attention of one sequence, a tile of queries a program. Grid: (tiles of BLOCK_Q queries, heads).

    q, out [queries, HEADS, HEAD_DIM]; k, v [keys, HEADS, HEAD_DIM]; lse [HEADS, queries] float32; all contiguous, any
    float dtype, float32 inside. Causal: the queries stand at the last positions, query i at keys - queries + i.
    A head over T tokens reads (2 + T / BLOCK_Q) × T × HEAD_DIM elements and writes T × HEAD_DIM; it does about
    2 × T² × HEAD_DIM FLOPs. Without the mask, it reads K and V about twice as often and does twice the FLOPs.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    at_q = (row[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + column[None, :]
    in_q = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    position, stop = keys - queries + row, keys
    if CAUSAL:
        stop = tl.minimum(keys, keys - queries + (tile + 1) * BLOCK_Q)
    m, l = tl.full([BLOCK_Q], -float("inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, stop, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        at_k = (key[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + column[None, :]
        in_k = (key < keys)[:, None] & (column < HEAD_DIM)[None, :]
        scores = tl.dot(query, tl.trans(tl.load(k + at_k, mask=in_k, other=0.0)), input_precision="ieee") * scale
        seen = (key < keys)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        safe = tl.where(new_m == -float("inf"), 0.0, new_m)
        weights, keep = tl.exp(scores - safe[:, None]), tl.exp(m - safe)
        values = tl.load(v + at_k, mask=in_k, other=0.0)
        l = keep * l + tl.sum(weights, axis=1)
        o = keep[:, None] * o + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        m = new_m
    l = tl.maximum(l, 1.0)
    tl.store(out + at_q, o / l[:, None], mask=in_q)
    tl.store(lse + head * queries + row, m + tl.log(l), mask=row < queries)


# endregion


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, block_q: int = 128, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """Attention of the last `len(q)` of `len(k)` positions. q [queries, heads, head_dim], k, v [keys, heads, head_dim].

    Returns (output like q, lse [heads, queries] float32).
    """
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if block < 16 or block & (block - 1):
            raise MinivllmError(f"{name} must be a power of two of at least 16, got {block}")
    if k.shape != v.shape or k.shape[1:] != q.shape[1:]:
        raise MinivllmError(f"heads and head dims must agree: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}")
    queries, heads, head_dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), torch.empty(heads, queries, device=q.device)
    grid = (triton.cdiv(queries, block_q), heads)
    if queries:
        flash_kernel[grid](
            out, lse, q, k, v, queries, len(k), 1 / math.sqrt(head_dim),
            CAUSAL=causal, HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=8, num_stages=2,
        )  # fmt: skip
    return out, lse


def stored_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """The naive way on many heads, in PyTorch: the same arguments as `flash_attention`, and its output."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
        scores.masked_fill_(ahead, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


# %% 7. The proof: against float64, in two parts that are merged, and inside a real model

SMALL_TILES = {"block_q": 32, "block_k": 32}  # for short texts
TEXT = "def total(prices, count):\n    result = 0\n    for price in prices:\n        result +="


def verify(device: torch.device) -> dict:
    """The kernel on awkward shapes against float64: in one pass, and over two parts of the keys, then merged."""
    errors = {}
    for dtype in (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16):
        for queries, keys, head_dim in track([(1, 33, 64), (31, 32, 80), (70, 97, 128)], "verifying the kernel"):
            q, (k, v) = torch.randn(queries, 2, head_dim), torch.randn(2, keys, 2, head_dim)
            q, k, v = (x.to(device, dtype) for x in (q, k, v))
            expected = stored_attention(q.double(), k.double(), v.double()).cpu()
            before = keys - queries  # keys that every query sees: attended to once, without a mask
            prefix = flash_attention(q, k[:before], v[:before], causal=False, **SMALL_TILES)
            suffix = flash_attention(q, k[before:], v[before:], **SMALL_TILES)
            whole, _ = flash_attention(q, k, v, **SMALL_TILES)
            ways = {"in one pass": whole, "two parts, merged": merged(prefix, suffix)}
            ways["T × T stored, by torch"] = stored_attention(q, k, v)
            for name, out in ways.items():
                key = f"{name}, {str(dtype).removeprefix('torch.')}"
                errors[key] = max(errors.get(key, 0.0), furthest(out, expected))
    errors["in the engine's pool, float32"], share = compare_with_paged(device)
    show_errors("The kernel", errors, 2e-2, column="")
    names = {"ours": "in one pass", "stored": "T × T stored, by torch", "paged": "in the engine's pool"}
    return {key: errors[f"{name}, float32"] for key, name in names.items()} | {"table_share": share}


def compare_with_paged(device: torch.device) -> tuple[float, float]:
    """The same keys in blocks scattered over a pool: (the engine's error, table bytes a byte of K and V).

    Tiles say what moves during one attention; blocks say where K and V lie between two. That kernel does both.
    """
    q, k, v = torch.randn(3, 80, 2, 64, device=device)
    expected, order = stored_attention(q.double(), k.double(), v.double()), torch.randperm(8)[:5].tolist()
    caches = torch.zeros(2, 8, 16, 2, 64, device=device)
    caches[:, order] = torch.stack([k, v]).view(2, 5, 16, 2, 64)
    starts, lengths, blocks = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 80], [80], [order]))
    paged = unified_attention(q, *caches, starts, lengths, blocks, 64**-0.5, backend="triton")
    return furthest(paged, expected), blocks.nbytes / (k.nbytes + v.nbytes)


def merged(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Results of `flash_attention` over different keys as one."""
    numbers = [(lse.T.cpu().numpy(), out.float().cpu().numpy()) for out, lse in parts]
    whole, _ = finish(reduce(merge, (Partial(lse, np.ones_like(lse), out) for lse, out in numbers)))
    return torch.from_numpy(whole)


@torch.inference_mode()
def attend_in_model(model: Decoder, encoded: Encoding, text: str) -> tuple[dict, dict]:
    """A model with our kernel as its attention: (how close its logits come, one row of its scores)."""
    tokens, rows, values = torch.tensor(encoded.ids, device=model.embed_tokens.weight.device), [], []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        rows.extend(torch.einsum("hd,khd->hk", q[-1], k) / math.sqrt(q.shape[-1]))
        values.extend(v[:, :, :3].transpose(0, 1))
        return flash_attention(q, k, v, **SMALL_TILES)[0] if HAS_TRITON else stored_attention(q, k, v)

    positions, plain = torch.arange(len(tokens), device=tokens.device), CausalAttention(model.config)
    ours, usual = (model.compute_logits(model(tokens, positions, how)) for how in (attend, plain))
    off, largest = furthest(ours, usual), max(row.max().item() for row in rows)
    assert off < 1e-3, f"the model's logits are off by {off}"
    beyond = " and ".join(dtype for dtype, limit in LIMITS.items() if largest > limit) or "no dtype here"
    kernel = "our kernel" if HAS_TRITON else "stored scores"
    words = f"The model on {kernel}: logits within {off:.0e}. Its scores reach {largest:.1f}: exp overflows {beyond}."
    console.print(words, soft_wrap=True)
    large = [row.max().item() > LIMITS["float16"] for row in rows]  # of those, if any, the one with the most to see
    liveliest = max(range(len(rows)), key=lambda index: (large[index], visible_steps(rows[index])))
    layer, head = divmod(liveliest, model.config.num_attention_heads)
    row = {
        "tokens": [text[start:end] for start, end in encoded.offsets],
        "scores": [round(score, 4) for score in rows[liveliest].tolist()],
        "values": [[round(x, 4) for x in value] for value in values[liveliest].tolist()],
    }
    return {"logits_off_by": off, "largest_score": largest}, {"layer": layer, "head": head, **row}


def visible_steps(scores: Tensor, keys_a_tile: int = 4) -> int:
    """Tiles of this row that raise the maximum so much that it shows, and so little that something is kept."""
    running = scores.cummax(0).values[keys_a_tile - 1 :: keys_a_tile]
    kept = (running[:-1] - running[1:]).exp()
    return int(((kept > 0.05) & (kept < 0.9)).sum())


def step_through(row: dict, keys_a_tile: int = 4) -> None:
    """That row, tile by tile: how m, l and O move, and that they end where the softmax of the whole row is."""
    scores, values = np.array([row["scores"]]), np.array(row["values"])
    state, rows = nothing_seen(1, values.shape[1]), []
    for first in range(0, scores.shape[1], keys_a_tile):
        tile, before = slice(first, first + keys_a_tile), state.m[0]
        state = softmax_step(state, scores[:, tile], values[tile])
        numbers = f"{state.m[0]:.2f}", f"{np.exp(before - state.m[0]):.3f}", f"{state.l[0]:.3f}"
        words = repr("".join(row["tokens"][tile]))[1:-1]
        rows.append((words, *numbers, " ".join(f"{x:+.3f}" for x in finish(state)[0][0])))
    expected = stable_softmax(scores)[0] @ values
    assert np.allclose(finish(state)[0][0], expected), "the tiles do not add up to the softmax"
    caption = "the softmax of the whole row gives " + " ".join(f"{x:+.3f}" for x in expected)
    title = f"\nOne row of scores (layer {row['layer']}, head {row['head']}), {keys_a_tile} keys a tile"
    table(title, ("keys", "m", "old kept", "l", "O / l, three numbers"), rows, caption)


# %% 8. The measurement: bytes, counted by the loops themselves; then time


def count_bytes(length: int, head_dim: int, block_q: int, block_k: int) -> dict:
    """Run both loops on arrays that count their trips; the model of the traffic must say the same, to the byte.

    Returns MiB that each loop allocated at its peak.
    """
    tiles, peaks = {"block_q": block_q, "block_k": block_k}, {}
    for name, attend, expected in (
        ("naive", naive_attention, naive_traffic(length, head_dim, itemsize=4)),
        ("tiled", partial(tiled_attention, **tiles), flash_traffic(length, head_dim, **tiles, itemsize=4)),
    ):
        vectors, trips = in_slow_memory(*np.ones((3, length, head_dim), np.float32))
        tracemalloc.start()
        attend(*vectors)
        peaks[name] = tracemalloc.get_traced_memory()[1] / MIB
        tracemalloc.stop()
        assert (trips.read, trips.written) == (expected.read, expected.written), f"{name}: {trips}, not {expected}"
    return peaks


def measure_traffic(head_dim: int, block_q: int, block_k: int, longest: int) -> dict:
    """Bytes that one head moves and keeps, against the length."""
    peaks = [count_bytes(length, head_dim, block_q, block_k) for length in (500, 2048)][-1]
    lengths = [2**power for power in range(10, longest.bit_length())]
    naive = [naive_traffic(length, head_dim) for length in lengths]
    tiled = [flash_traffic(length, head_dim, block_q, block_k) for length in lengths]
    less = [a.moved / b.moved for a, b in zip(naive, tiled, strict=True)]
    rows = [
        (f"{n:,}", f"{a.moved / MIB:,.1f}", f"{b.moved / MIB:,.1f}", f"{ratio:.1f} ×", f"{a.extra / MIB:,.0f}",
         f"{b.extra / MIB:.3f}")
        for n, a, b, ratio in zip(lengths, naive, tiled, less, strict=True)
    ]  # fmt: skip
    columns = ("tokens", "T × T moves", "tiles move", "less by", "T × T keeps", "tiles keep")
    caption = (
        f"tiles of {block_q} × {block_k}; up to 2,048 tokens the loops themselves counted the same\n"
        f"at 2,048, in float32, NumPy allocated {peaks['naive']:.1f} MiB for T × T, {peaks['tiled']:.1f} for tiles"
    )
    table(f"One head of {head_dim}, causal, 16 bits: MiB", columns, rows, caption)
    moved = {"naive": [one.moved for one in naive], "tiled": [one.moved for one in tiled]}
    kept = {"naive": [one.extra for one in naive], "tiled": [one.extra for one in tiled]}
    return {"lengths": lengths, "moved": moved, "kept": kept, "less": less[-1], "peak_mib": peaks}


HEAD_DIMS = [32, 64, 128, 256]


def fit_powers(traffic: dict, on_chip: int) -> dict:
    """With which power of T, of the head dim and of the memory on the chip do the counted bytes grow?"""

    def moved(head_dim: int, memory: int) -> int:
        return flash_traffic(65536, head_dim, largest_block_q(memory, head_dim, 16), 16).moved

    lengths, half = traffic["lengths"], len(traffic["lengths"]) // 2  # only in the longer half is T far below T²
    powers = {f"{name}_moved": exponent(lengths[half:], traffic["moved"][name][half:]) for name in ("naive", "tiled")}
    powers |= {f"{name}_kept": exponent(lengths, traffic["kept"][name]) for name in ("naive", "tiled")}
    powers["head_dim"] = exponent(HEAD_DIMS, [moved(head_dim, on_chip) for head_dim in HEAD_DIMS])
    chips = [on_chip // 4, on_chip // 2, on_chip, on_chip * 2]
    powers["on_chip"] = exponent(chips, [moved(64, memory) for memory in chips])
    forms = (
        ("T × T stored", "T^{naive_moved:.2f}", "T^{naive_kept:.2f}"),
        ("tiles", "T^{tiled_moved:.2f} d^{head_dim:.2f} M^{on_chip:.2f}", "T^{tiled_kept:.2f}"),
    )
    rows = [[form.format(**powers) for form in row] for row in forms]
    table("\nFitted: T tokens, d head dim, M bytes on the chip", ("", "bytes moved", "bytes kept"), rows)
    return powers


PAPERS_GB = 40.3  # figure 2, what standard attention moved, forward and backward


def compare_with_paper() -> dict:
    """The shape of the paper's figure 2, forward: 64 sequences of 1,024 tokens, 16 heads of 64, 16 bits, no mask."""
    naive, least, heads = naive_traffic(1024, 64).moved, least_traffic(1024, 64), 64 * 16
    tiled = {f"tiles of {n} queries": flash_traffic(1024, 64, n, 64, causal=False).moved for n in (64, 128, 256)}
    ways = {"T × T stored": naive, **tiled, "every byte moved once": least}
    rows = [(way, f"{moved * heads / 1e9:.2f}", f"{naive / moved:.1f} ×") for way, moved in ways.items()]
    table("\nThe shape of the paper's figure 2, forward", ("", "GB", "less by"), rows)
    both_ways = PAPERS_GB * 1e9 / (3 * least * heads)  # on the way back 5 arrays in, 3 out
    less = {name.split()[2]: naive / moved for name, moved in tiled.items()}
    return {"ceiling": naive / least, "ceiling_both_ways": both_ways, "tiles": less}


def measure_time(device: torch.device, lengths: list[int]) -> dict:
    """Stored scores against fused kernels, in one run. On a CPU the fused one is PyTorch's, tiled in the same way."""
    on_gpu = device.type == "cuda"
    heads, head_dim, dtype = (32, 128, torch.bfloat16) if on_gpu else (4, 64, torch.float32)
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if on_gpu else (SDPBackend.FLASH_ATTENTION,)
    found, rows, seconds = {}, [], {}
    for length in track(lengths, "timing attention"):
        q, k, v = torch.randn(3, length, heads, head_dim, device=device, dtype=dtype)
        batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
        ways = {"T × T stored": partial(stored_attention, q, k, v)}
        if on_gpu:
            ways["our kernel"] = partial(flash_attention, q, k, v)
        ways |= {f"torch's {one.name.split('_')[0].lower()}": partial(fused, batch, one) for one in backends}
        seconds = {way: median_seconds(attend, repeats=7, warmup=2, device=device) for way, attend in ways.items()}
        stored, tiled, *_ = seconds.values()
        found[str(length)] = {"gain": stored / tiled, "ms": {way: 1e3 * time for way, time in seconds.items()}}
        if on_gpu:
            found[str(length)]["share_of_best"] = min(list(seconds.values())[2:]) / tiled
        rate = heads * flash_traffic(length, head_dim, 1, 1).flops / tiled
        cells = (f"{1e3 * time:,.2f}" for time in seconds.values())
        rows.append((f"{length:,}", *cells, f"{stored / tiled:.1f} ×", f"{rate / 1e9:,.0f}"))
    title = f"{heads} heads of {head_dim}, causal, {device_name(device)}: ms"
    table(title, ("tokens", *seconds, "first against second", "GFLOP/s of the second"), rows)
    return {"by_length": found, "gain": found[str(lengths[-1])]["gain"]}


def fused(batch: list[Tensor], backend: SDPBackend) -> Tensor:
    """PyTorch's own fused attention, causal: q, k, v [1, heads, T, head_dim]."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*batch, is_causal=True)


# %% 9. Break it: a row that sees nothing, a tile that does not fit (the budget and the exponential broke above)


def row_without_keys() -> dict:
    """A window of 4 keys, in tiles of 4: in the first tile that this query meets, it may see no key."""
    scores, values = np.array([[-np.inf] * 4 + [1.0, 2.0, 3.0, 4.0]]), np.eye(8)
    state = nothing_seen(1, 8)
    for first in (0, 4):
        state = softmax_step(state, scores[:, first : first + 4], values[first : first + 4])
    with np.errstate(invalid="ignore"):
        unguarded = float(np.exp(np.subtract(-np.inf, -np.inf)))  # what the first tile would leave in l and O
    console.print(f"A tile masked as a whole: exp(-inf - -inf) = {unguarded}, for good. Guarded, l = {state.l[0]:.4f}.")
    return {"unguarded_is_nan": math.isnan(unguarded), "guarded": float(state.l[0])}


TILES = [(64, 32, 2), (128, 64, 2), (128, 128, 2), (128, 128, 4), (256, 64, 2)]  # queries, keys, loads in flight


def compile_tiles(target: str, tiles: list[tuple[int, int, int]]) -> dict:
    """What the compiler says of our kernel with these tiles, without a GPU: what fits, and what spills."""
    shape = {"queries": 4096, "keys": 4096, "scale": 0.1, "CAUSAL": True, "HEADS": 32, "HEAD_DIM": 128, "BLOCK_D": 128}
    arguments = {**dict.fromkeys(("out", "q", "k", "v"), "*bf16"), "lse": "*fp32", **shape}
    found, rows = {}, []
    for block_q, block_k, stages in track(tiles, "compiling ahead of time"):
        blocks = {"BLOCK_Q": block_q, "BLOCK_K": block_k}
        code = compile_for(target, flash_kernel, arguments | blocks, {"num_warps": 8, "num_stages": stages})
        fits = "yes" if code.fits else "NO"
        rows.append((f"{block_q} × {block_k}, {stages}", f"{code.shared:,}", fits, f"{code.spilled:,}"))
        found[f"{block_q}x{block_k}x{stages}"] = {"shared": code.shared, "fits": code.fits, "spilled": code.spilled}
    columns = ("queries × keys, stages", "shared memory", "fits", "spilled registers")
    table(f"Compiled for {target}, head dim 128, in bytes; {SHARED_MEMORY[target]:,} are there", columns, rows)
    return found


# %% The talk, in order


def draw(row: dict, found: dict, path: str) -> None:
    """A row of scores with its running maximum; bytes moved and bytes kept, against the length."""
    traffic, scores, tile = found["traffic"], np.array(row["scores"]), np.arange(len(row["scores"])) // 4
    with panels(path, 3) as (left, middle, right):
        left.bar(np.arange(len(scores)), scores, color=[(palette.SKY, palette.BLUE)[index % 2] for index in tile])
        running = [scores[tile <= index].max() for index in tile]
        left.step(np.arange(len(scores)), running, where="mid", color=palette.VERMILLION)
        left.set(title="One row of scores, and the running m", xlabel="keys, four to a tile", xticks=[])
        for axes, kind in ((middle, "moved"), (right, "kept")):
            axes.loglog(traffic["lengths"], traffic[kind]["naive"], "o-", base=2, color=palette.VERMILLION)
            axes.loglog(traffic["lengths"], traffic[kind]["tiled"], "s-", base=2, color=palette.BLUE)
            axes.set(title=f"Bytes {kind} by one head", xlabel="tokens", ylabel="bytes")
            axes.legend(["T × T stored", "tiles"])


def main(arguments: argparse.Namespace) -> None:
    """Run the lesson from top to bottom."""
    quick, found = arguments.quick, {}
    on_chip = arguments.on_chip_kib * 1024
    largest_block_q(on_chip // 4, 64, 16), largest_block_q(on_chip, max(HEAD_DIMS), 16)  # or it is too small to fit
    if not 1 <= len(arguments.text) <= 1000:
        raise MinivllmError(f"the text must have 1 to 1,000 characters, not {len(arguments.text):,}")
    if arguments.head_dim > 1024:
        raise MinivllmError(f"--head-dim must be at most 1,024, got {arguments.head_dim:,}")
    if arguments.block_q * arguments.block_k < 64:
        raise MinivllmError("a tile needs 64 scores or more, or NumPy counts for hours: raise --block-q or --block-k")
    keep_freed_memory()
    device = begin("Lesson 03. FlashAttention", arguments)
    model, tokenizer = load_model(arguments.model, device, "float32")[0], load_tokenizer(arguments.model)
    heading("1. The T × T matrix")
    found["memory"] = run_out_of_memory(arguments.heads, arguments.budget_mib * MIB)
    heading("2. The softmax wants its maximum")
    found["overflow"] = overflow()
    heading("3–5. Tile by tile")
    found["model"], row = attend_in_model(model, tokenizer.encode(arguments.text), arguments.text)
    step_through(row)
    heading("6–7. The kernel, verified")
    found["errors"] = prove(verify, device)
    heading("8. Bytes, then time")
    longest = 2**14 if quick else 2**17
    found["traffic"] = measure_traffic(arguments.head_dim, arguments.block_q, arguments.block_k, longest)
    found["powers"] = fit_powers(found["traffic"], on_chip)
    found["figure_2"] = compare_with_paper()
    lengths = [512, 1024] if quick else [512, 1024, 2048, 4096]
    found["time"] = measure_time(device, [*lengths, 8192] if arguments.full or device.type == "cuda" else lengths)
    heading("9. Break it")
    found["no_keys"] = row_without_keys()
    tiles = [(128, 64, 2), (128, 128, 4)] if quick else TILES
    found["tiles"] = compile_tiles(arguments.target, tiles) if HAS_TRITON else {}
    powers, less, ceiling = found["powers"], found["traffic"]["less"], found["figure_2"]["ceiling"]
    closing(
        f"The scores of {found['memory']['refused_at']:,} tokens broke the budget. Tiles keep 4 bytes a token: "
        f"T^{powers['tiled_kept']:.0f} in place of T^{powers['naive_kept']:.0f}.",
        f"Traffic stays quadratic (T^{powers['tiled_moved']:.2f}), {less:.1f} times less of it at {longest:,} tokens. "
        f"At the paper's shape, forward, nothing can save more than {ceiling:.0f} times.",
        f"The same output, {found['time']['gain']:.1f} times faster than stored scores at the longest in this run.",
    )
    if arguments.row:
        write_json(arguments.row, "attention_row", row)
    keep(__file__, found, arguments, partial(draw, row))


def parser() -> argparse.ArgumentParser:
    """The lesson's own knobs, beside those that every lesson has."""
    flags = lesson_parser(__doc__, EMBEDDED_MODEL)
    flags.add_argument("--heads", type=positive_int, default=8, help="heads whose scores must fit the budget")
    flags.add_argument("--budget-mib", type=positive_int, default=1024, help="memory for stored scores")
    flags.add_argument("--head-dim", type=positive_int, default=64, help="width of a head in the counted loops")
    flags.add_argument("--block-q", type=positive_int, default=128, help="queries a tile in the counted loops")
    flags.add_argument("--block-k", type=positive_int, default=64, help="keys a tile in the counted loops")
    flags.add_argument("--on-chip-kib", type=positive_int, default=228, help="memory on the chip, for the powers")
    flags.add_argument("--target", choices=tuple(SHARED_MEMORY), default="sm_90", help="whose compiler judges tiles")
    flags.add_argument("--text", default=TEXT, help="what the model reads")
    flags.add_argument("--row", metavar="FILE", help="also write one row of the model's scores, which the widget shows")
    return flags


if __name__ == "__main__":
    run(main, parser())
