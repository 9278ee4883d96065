"""Lesson 03. FlashAttention: a softmax over scores that are never stored.

Builds attention with its T × T matrix, then the online softmax, the tiled loop and Triton kernels without it. You learn
why a row can be summed before it is complete, what that saves, and why two partial results merge exactly.

    uv run python vllm/03_flash_attention.py   # under a minute on a laptop, no GPU needed; --help lists the knobs
"""
# ruff: noqa: E741 (m, l and O are the paper's letters)

import math
from argparse import Namespace
from functools import partial, reduce
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED, tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.flash_attention import report
from minivllm_lab.flash_attention.attention_in_model import attend_in_model
from minivllm_lab.flash_attention.attention_traffic import flash_traffic, naive_traffic
from minivllm_lab.flash_attention.other_attention import compare_with_pool, stored_attention
from minivllm_lab.flash_attention.slow_memory import peak_of
from minivllm_lab.lesson import begin, keep
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, prove, show_errors
from minivllm_lab.tables import console, heading


# %% 1. The pain: a matrix of T × T
# region: naive
def stable_softmax(scores: np.ndarray) -> np.ndarray:
    """Take the softmax of each row, its maximum subtracted first, so that no exponential exceeds 1."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def masked(scores: np.ndarray, rows: np.ndarray, first_key: int = 0) -> np.ndarray:
    """Set the scores of query positions `rows` to -inf at later keys; the first key is at `first_key`."""
    ahead = first_key + np.arange(scores.shape[1]) > rows[:, None]
    return np.where(ahead, scores.dtype.type(-np.inf), scores)


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Compute causal attention of one head with stored scores. Every `[:]` is a trip to memory or back.

    q, k, v [T, head_dim] -> [T, head_dim].
    """
    scores = np.empty_like(q, shape=(len(q), len(k)))
    weights, out = np.empty_like(scores), np.empty_like(q)
    scores[:] = masked(q[:] @ k[:].T / math.sqrt(q.shape[1]), np.arange(len(q)))
    weights[:] = stable_softmax(scores[:])
    out[:] = weights[:] @ v[:]
    return out


# endregion


# %% 2 and 3. The idea: the maximum is known only at the end, so keep a running one, and rescale the sums under it
class Partial(NamedTuple):
    """Attention of some queries over some of their keys, not yet divided by l."""

    m: np.ndarray  # [rows] the largest score
    l: np.ndarray  # [rows] the sum of exp(score - m)
    o: np.ndarray  # [rows, head_dim] the sum of exp(score - m) × value


def nothing_seen(rows: int, head_dim: int) -> Partial:
    """Return the state of attention over no keys."""
    return Partial(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, head_dim)))


# region: softmax_step
def softmax_step(state: Partial, scores: np.ndarray, values: np.ndarray) -> Partial:
    """Add one more tile to the state. scores [rows, keys], -inf where masked; values [keys, head_dim]."""
    m = np.maximum(state.m, scores.max(axis=1))
    safe = np.where(np.isneginf(m), 0.0, m)  # a row that has seen no key: -inf - -inf is not a number
    weights = np.exp(scores - safe[:, None])
    keep = np.exp(state.m - safe)
    l = keep * state.l + weights.sum(axis=1)
    o = keep[:, None] * state.o + weights @ values
    return Partial(m, l, o)


# endregion


def finish(state: Partial) -> tuple[np.ndarray, np.ndarray]:
    """Return the output [rows, head_dim] and the log of each row's sum [rows]; without keys they are 0 and -inf."""
    l = np.maximum(state.l, 1.0)  # exact: the key with the largest score adds exp(0) = 1
    return state.o / l[..., None], state.m + np.log(l)


# %% 4. The same algebra merges two halves
# region: merge
def merge(a: Partial, b: Partial) -> Partial:
    """Combine attention over two sets of keys. A finished result is a Partial too: m = its log, l = 1, o = output."""
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
    """Compute causal attention of one head, a tile of queries at a time, each over its tiles of keys.

    q [queries, head_dim], the last of the positions; k, v [keys, head_dim] -> (output like q, lse [queries] float32).
    """
    out, lse = np.empty_like(q), np.empty_like(q, shape=len(q), dtype=np.float32)
    for start in range(0, len(q), block_q):
        tile = q[start : start + block_q] / math.sqrt(q.shape[1])
        rows = len(k) - len(q) + start + np.arange(len(tile))  # positions: the queries are the last ones
        state = nothing_seen(*tile.shape)
        for first in range(0, rows[-1] + 1, block_k):  # no row of this tile sees the keys beyond
            scores = tile @ k[first : first + block_k].T
            state = softmax_step(state, masked(scores, rows, first), v[first : first + block_k])
        out[start : start + block_q], lse[start : start + block_q] = finish(state)
    return out, lse


# endregion


# %% 6. The kernel: a row's sums, then its values, then the mask; and all of it for tiles of queries
# region: row_kernels
@triton.jit
def row_sums_kernel(m_out, l_out, scores, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute m and l of each row of scores [rows, KEYS], KEYS a multiple of BLOCK. Grid: (rows,)."""
    row = tl.program_id(0)
    m, l = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, KEYS, BLOCK):
        tile = tl.load(scores + row * KEYS + start + tl.arange(0, BLOCK))
        new_m = tl.maximum(m, tl.max(tile, axis=0))
        l = tl.exp(m - new_m) * l + tl.sum(tl.exp(tile - new_m), axis=0)
        m = new_m
    tl.store(m_out + row, m)
    tl.store(l_out + row, l)


@triton.jit
def row_output_kernel(out, scores, values, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the softmax of each row of scores [rows, KEYS] by values [KEYS, HEAD_DIM]. Grid: (rows,)."""
    row, column = tl.program_id(0), tl.arange(0, HEAD_DIM)
    m, l = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    o = tl.zeros([HEAD_DIM], tl.float32)
    for start in range(0, KEYS, BLOCK):
        key = start + tl.arange(0, BLOCK)
        tile = tl.load(scores + row * KEYS + key)
        value = tl.load(values + key[:, None] * HEAD_DIM + column[None, :])
        new_m = tl.maximum(m, tl.max(tile, axis=0))
        weights, keep = tl.exp(tile - new_m), tl.exp(m - new_m)
        l = keep * l + tl.sum(weights, axis=0)
        o = keep * o + tl.sum(weights[:, None] * value, axis=0)
        m = new_m
    tl.store(out + row * HEAD_DIM + column, o / l)


@triton.jit
def causal_rows_kernel(out, scores, values, rows, keys, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Attend causally for rows at the last positions of any number of keys: row i sees keys - rows + i + 1 keys."""
    row, column = tl.program_id(0), tl.arange(0, HEAD_DIM)
    m, l = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    o = tl.zeros([HEAD_DIM], tl.float32)
    stop = keys - rows + row + 1
    for start in range(0, stop, BLOCK):
        key = start + tl.arange(0, BLOCK)
        tile = tl.load(scores + row * keys + key, mask=key < stop, other=-float("inf"))
        value = tl.load(values + key[:, None] * HEAD_DIM + column[None, :], mask=(key < stop)[:, None], other=0.0)
        new_m = tl.maximum(m, tl.max(tile, axis=0))
        weights, keep = tl.exp(tile - new_m), tl.exp(m - new_m)
        l = keep * l + tl.sum(weights, axis=0)
        o = keep * o + tl.sum(weights[:, None] * value, axis=0)
        m = new_m
    tl.store(out + row * HEAD_DIM + column, o / l)


# endregion
# region: flash_kernel
@triton.jit
def flash_kernel(
    out, lse, q, k, v, queries, keys, scale, CAUSAL: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend in one sequence, a tile of queries per program. Grid: (tiles of BLOCK_Q queries, heads).

    q, out [queries, HEADS, HEAD_DIM]; k, v [keys, HEADS, HEAD_DIM]; lse [HEADS, queries] float32; all contiguous, any
    float dtype, float32 inside. Causal: the queries are at the last positions, query i at keys - queries + i.
    A head over T tokens reads (2 + T / BLOCK_Q) × T × HEAD_DIM elements and writes T × HEAD_DIM; it does about
    2 × T² × HEAD_DIM FLOPs. Without the mask, it reads K and V about twice as often and does twice the FLOPs.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    # 1. Which queries are this program's? They are loaded once.
    row, column = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    at_q = (row[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + column[None, :]
    in_q = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
    query = tl.load(q + at_q, mask=in_q, other=0.0)
    # 2. The queries are at the last positions. No key behind the tile's last position is read.
    position, stop = keys - queries + row, keys
    if CAUSAL:
        stop = tl.minimum(keys, keys - queries + (tile + 1) * BLOCK_Q)
    m, l = tl.full([BLOCK_Q], -float("inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, stop, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        at_k = (key[:, None].to(tl.int64) * HEADS + head) * HEAD_DIM + column[None, :]
        in_k = (key < keys)[:, None] & (column < HEAD_DIM)[None, :]
        # 3. A tile of scores: it stays on the chip.
        scores = tl.dot(query, tl.trans(tl.load(k + at_k, mask=in_k, other=0.0)), input_precision="ieee") * scale
        # 4. A key ahead of a query counts as -inf.
        seen = (key < keys)[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        # 5. The new maximum, and the factor for all that was summed under the old one.
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        safe = tl.where(new_m == -float("inf"), 0.0, new_m)
        weights, keep = tl.exp(scores - safe[:, None]), tl.exp(m - safe)
        values = tl.load(v + at_k, mask=in_k, other=0.0)
        # 6. Both sums shrink, then the tile is added. The division waits for the end.
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
    """Attend: q [queries, heads, head_dim]; k, v [keys, heads, head_dim] -> (output like q, lse [heads, queries]).

    The queries are at the last positions.
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


# %% 7. The proof: against float64, in two parts that are merged, and inside a real model
def verify(device: torch.device) -> dict:
    """Compare the kernel with float64 on awkward shapes: in one pass, and over two parts of the keys, then merged."""
    errors, attend = {}, partial(flash_attention, block_q=32, block_k=32)  # short texts, small tiles
    dtypes = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
    cases = list(product(dtypes, ((1, 33, 64), (31, 32, 80), (70, 97, 128))))
    for dtype, (queries, keys, head_dim) in track(cases, "verifying the kernel"):
        q, k, v = (torch.randn(n, 2, head_dim).to(device, dtype) for n in (queries, keys, keys))
        expected = stored_attention(q.double(), k.double(), v.double())
        before = keys - queries  # keys that every query sees: attended to without a mask
        prefix = attend(q, k[:before], v[:before], causal=False)
        suffix = attend(q, k[before:], v[before:])
        ways = {"in one pass": attend(q, k, v)[0], "two parts, merged": merged(prefix, suffix)}
        for name, out in {**ways, "T × T stored, by torch": stored_attention(q, k, v)}.items():
            key = f"{name}, {str(dtype).removeprefix('torch.')}"
            errors[key] = max(errors.get(key, 0.0), furthest(out, expected))
    errors["in the engine's pool, float32"], share = compare_with_pool(device)
    show_errors("The kernel", errors, 2e-2, column="")
    names = {"ours": "in one pass", "stored": "T × T stored, by torch", "paged": "in the engine's pool"}
    return {key: errors[f"{name}, float32"] for key, name in names.items()} | {"table_share": share}


def merged(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Merge the results of `flash_attention` over different keys."""
    numbers = [(lse.T.cpu().numpy(), out.float().cpu().numpy()) for out, lse in parts]
    whole, _ = finish(reduce(merge, (Partial(lse, np.ones_like(lse), out) for lse, out in numbers)))
    return torch.from_numpy(whole)


# %% 8. The measurement: bytes, counted by the loops themselves; then time
def count_bytes(length: int, head_dim: int, block_q: int, block_k: int) -> dict:
    """Check that both loops move as many bytes as the traffic model says; return the MiB that each allocated."""
    tiled = partial(tiled_attention, block_q=block_q, block_k=block_k)
    arrays, size = np.ones((3, length, head_dim), np.float32), (length, head_dim)
    naive_peak = peak_of(naive_attention, arrays, naive_traffic(*size, itemsize=4))
    return {"naive": naive_peak, "tiled": peak_of(tiled, arrays, flash_traffic(*size, block_q, block_k, itemsize=4))}


# %% 9. Break it: a row that sees nothing, a tile that does not fit (the budget broke above)
def row_without_keys() -> dict:
    """Attend in a window of 4 keys, in tiles of 4: the query may see no key of the first tile that it meets."""
    scores, values = np.array([[-np.inf] * 4 + [1.0, 2.0, 3.0, 4.0]]), np.eye(8)
    state = softmax_step(nothing_seen(1, 8), scores[:, :4], values[:4])
    guarded = float(softmax_step(state, scores[:, 4:], values[4:]).l[0])
    with np.errstate(invalid="ignore"):
        unguarded = float(np.exp(np.subtract(-np.inf, -np.inf)))  # what the first tile would leave in l and O
    console.print(f"A fully masked tile: exp(-inf - -inf) = {unguarded}, and it stays so. Guarded, l = {guarded:.4f}.")
    return {"unguarded_is_nan": math.isnan(unguarded), "guarded": guarded}


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, results, control = begin("Lesson 03. FlashAttention", arguments), {}, Control()
    plan = report.plan(arguments, device)
    heading("1. The T × T matrix")
    results["memory"] = report.show_budget(report.HEADS, report.BUDGET)
    heading("2–5. Tile by tile")
    results["overflow"] = dict(report.LIMITS)
    kernel = partial(flash_attention, block_q=32, block_k=32) if HAS_TRITON else None
    in_model = attend_in_model(plan.model, plan.tokenizer, report.TEXT, kernel, report.LIMITS["float16"])
    results["model"] = report.show_model(in_model, arguments.row)
    heading("6–7. The kernel, verified")
    results["errors"] = prove(verify, device)
    heading("8. Bytes, then time")
    size = (arguments.head_dim, arguments.block_q, arguments.block_k)
    peaks = [count_bytes(length, *size) for length in track((500, 2048), "counting bytes")][-1]
    results |= report.show_traffic(*size, plan.longest, peaks)
    with control.watch():
        results["time"] = report.time_attention(device, plan.lengths, flash_attention)
    heading("9. Break it")
    results["no_keys"] = row_without_keys()
    results["tiles"] = report.show_tiles(arguments.target, flash_kernel, plan.tiles) if HAS_TRITON else {}
    report.conclude(results, control.disturbance())
    keep(__file__, results, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)
if __name__ == "__main__":
    run(main, parser())
