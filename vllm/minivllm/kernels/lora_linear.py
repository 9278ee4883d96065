"""`y += B (A x)` for every row with an adapter, in two launches for all adapters of a step: shrink,
then expand.

A linear may consist of several merged ones, side by side in y (q, k and v; gate and up), called
slices. For each slice an adapter has an A and a B, with a rank of their own up to `max_rank`, or
none. An adapter is stored in one slot of two stacked tensors.

Layouts
    x        [rows, in], a row contiguous
    y        [rows, out], contiguous: the base layer's output, which the adapters' are added to
    a        [slices, slots, max_rank, in]
    b        [slots, max_rank, out], B transposed, so that both kernels walk along contiguous numbers
    ranks    int32 [slices, slots]; 0: this slot's adapter leaves this slice alone
    bounds   int32 [slices + 1]: where each slice begins in `out`
    shrunk   fp32 [splits, slices, rows, max_rank]: partial sums of A x, in the sorted order of `LoRAKernelMeta`

Grid
    shrink  (row tiles × rank tiles × splits, slices, active slots)
    expand  (row tiles × column tiles of the widest slice, slices, active slots)
A program beyond its slot's rows, rank or slice ends at once, so a slot costs only the rows and rank
that it has, though its memory is for `max_rank`. A decode has few rows, and a long sum for each:
the shrink cuts it into `splits` parts, which the expand adds in a fixed order, so that results do
not depend on which program finishes first. vLLM adds them atomically.

Must move, for each active slot: its A once per row tile and its B, rank × (slices × in + out)
numbers; x, and y twice, once for each slice or column tile. 2 × rows × rank × (slices × in + out)
FLOPs. With few rows, only the bytes of A and B matter.

In vLLM v0.33.0: `vllm/lora/ops/triton_ops/lora_shrink_op.py` (`_lora_shrink_kernel`),
`lora_expand_op.py` (`_lora_expand_kernel`), called by `vllm/lora/punica_wrapper/punica_gpu.py`
(`add_lora_linear`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minivllm.kernels.attention_launch import dot_type
from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.lora_calls import lora_linear_cpu
from minivllm.kernels.lora_metadata import Adapters, LoRAKernelMeta
from minivllm.platforms.triton_utils import tl, triton

# Up to this many rows of a slot, the shrink divides its sums.
FEW_ROWS = 64
MOST_SPLITS = 16
BLOCK_K, BLOCK_N = 128, 64
# Loads are wide if every slice's first column is a multiple of this.
ALIGNMENT = 16


@triton.jit(do_not_specialize=["rows"])
def lora_shrink_kernel(
    shrunk,
    x,
    a,
    ranks,
    indices,
    active,
    starts,
    counts,
    rows,
    K,
    x_stride,
    slots,
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (row tiles × rank tiles × splits, slices, active slots)."""
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    first_rank = tile % tl.cdiv(MAX_RANK, BLOCK_R) * BLOCK_R
    first_row = tile // tl.cdiv(MAX_RANK, BLOCK_R) * BLOCK_M
    piece = tl.program_id(1)
    slot = tl.load(active + tl.program_id(2)).to(tl.int64)
    if slot < 0:  # a CUDA graph's grid has room for all slots
        return
    count = tl.load(counts + tl.program_id(2))
    rank = tl.load(ranks + piece * slots + slot)
    if (first_row >= count) | (first_rank >= rank):
        return
    number = first_row + tl.arange(0, BLOCK_M)
    wanted = number < count
    place = tl.load(starts + tl.program_id(2)) + number
    row = tl.load(indices + place, mask=wanted, other=0).to(tl.int64)
    r = first_rank + tl.arange(0, BLOCK_R)
    inside = r < rank
    weights = a + ((piece * slots + slot) * MAX_RANK + r) * K
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(split * share, tl.minimum(K, (split + 1) * share), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        xs = tl.load(x + row[:, None] * x_stride + k[None, :], mask=wanted[:, None] & (k < K)[None, :], other=0.0)
        ws = tl.load(weights[None, :] + k[:, None], mask=inside[None, :] & (k < K)[:, None], other=0.0)
        sums += tl.dot(xs.to(DOT_TYPE), ws.to(DOT_TYPE), input_precision="ieee")
    out = shrunk + ((split * SLICES + piece) * rows + place.to(tl.int64)[:, None]) * MAX_RANK + r[None, :]
    tl.store(out, sums, mask=wanted[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def lora_expand_kernel(
    y,
    shrunk,
    b,
    ranks,
    bounds,
    indices,
    active,
    starts,
    counts,
    rows,
    N,
    slots,
    column_tiles,
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # divides all of `bounds`
):
    """Grid (row tiles × column tiles of the widest slice, slices, active slots)."""
    first_row = tl.program_id(0) // column_tiles * BLOCK_M
    piece = tl.program_id(1)
    slot = tl.load(active + tl.program_id(2)).to(tl.int64)
    if slot < 0:  # a CUDA graph's grid has room for all slots
        return
    count = tl.load(counts + tl.program_id(2))
    rank = tl.load(ranks + piece * slots + slot)
    first_column = tl.load(bounds + piece) + tl.program_id(0) % column_tiles * BLOCK_N
    first_column = tl.multiple_of(first_column, ALIGNMENT)
    last_column = tl.multiple_of(tl.load(bounds + piece + 1), ALIGNMENT)
    if (first_row >= count) | (first_column >= last_column) | (rank == 0):
        return
    number = first_row + tl.arange(0, BLOCK_M)
    wanted = number < count
    place = (tl.load(starts + tl.program_id(2)) + number).to(tl.int64)
    row = tl.load(indices + place, mask=wanted, other=0).to(tl.int64)
    column = first_column + tl.arange(0, BLOCK_N)
    inside = column < last_column
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        small = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        # In one order, so that results do not depend on which program was first.
        for split in range(SPLITS):
            at = shrunk + ((split * SLICES + piece) * rows + place[:, None]) * MAX_RANK + r[None, :]
            small += tl.load(at, mask=wanted[:, None] & (r < rank)[None, :], other=0.0)
        weights = b + (slot * MAX_RANK + r)[:, None] * N + column[None, :]
        ws = tl.load(weights, mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        sums += tl.dot(small.to(DOT_TYPE), ws.to(DOT_TYPE), input_precision="ieee")
    at = y + row[:, None] * N + column[None, :]
    mask = wanted[:, None] & inside[None, :]
    sums += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, sums.to(y.dtype.element_ty), mask=mask)


def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    bounds: Tensor,
    meta: LoRAKernelMeta,
    *,
    edges: Sequence[int] | None = None,
    fixed_grid: bool = False,
    backend: str | None = None,
) -> None:
    """Add to each row of y its adapter's B (A x); see the head of this file for the layouts.

    Args:
        y, x, a, b, ranks, bounds: see above.
        meta: the slot of each row.
        edges: `bounds` on the host; None reads them, which waits for the device.
        fixed_grid: launch enough programs for any slots of these rows, as a CUDA graph must.
        backend: "triton" or "cpu"; None follows x's device.

    Shapes are not checked: the layers that call it have made all tensors.
    """
    if not fixed_grid and not meta.num_active:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    edges = bounds.tolist() if edges is None else edges
    adapters = Adapters(a, b, ranks, bounds, edges)
    if choose_backend(backend, x) == "cpu":
        lora_linear_cpu(y, x, adapters, meta)
    else:
        _launch(y, x, adapters, meta, fixed_grid)


def tiles(most_rows: int, width: int, max_rank: int) -> dict[str, int]:
    """Return the kernels' constants for the maximum rows per slot, the width of x and `max_rank`;
    BLOCK_K is for the shrink kernel.
    """
    block_r = max(16, min(32, triton.next_power_of_2(max_rank)))
    if most_rows > FEW_ROWS:
        return {"SPLITS": 1, "BLOCK_M": 32, "BLOCK_R": block_r, "BLOCK_K": BLOCK_K // 2}
    splits = min(MOST_SPLITS, triton.cdiv(width, 2 * BLOCK_K))
    return {"SPLITS": splits, "BLOCK_M": 16, "BLOCK_R": block_r, "BLOCK_K": BLOCK_K}


def _launch(y: Tensor, x: Tensor, adapters: Adapters, meta: LoRAKernelMeta, fixed_grid: bool) -> None:
    a, b, ranks, bounds, edges = adapters
    rows, width = x.shape
    slices, slots, max_rank, _ = a.shape
    most_rows = rows if fixed_grid else meta.most_rows
    num_active = min(rows, slots) if fixed_grid else meta.num_active
    constants = tiles(most_rows, width, max_rank)
    block_k = constants.pop("BLOCK_K")
    constants |= {"SLICES": slices, "MAX_RANK": max_rank, "DOT_TYPE": dot_type(a.dtype, a.dtype)}
    shrunk = torch.empty(constants["SPLITS"], slices, rows, max_rank, dtype=torch.float32, device=x.device)
    where = (meta.indices, meta.active, meta.starts, meta.counts)
    row_tiles = triton.cdiv(most_rows, constants["BLOCK_M"])
    rank_tiles = triton.cdiv(max_rank, constants["BLOCK_R"])
    lora_shrink_kernel[(row_tiles * rank_tiles * constants["SPLITS"], slices, num_active)](
        shrunk, x, a, ranks, *where, rows, width, x.stride(0), slots, BLOCK_K=block_k, num_warps=4, **constants
    )
    widest = max(last - first for first, last in pairwise(edges))
    column_tiles = triton.cdiv(widest, BLOCK_N)
    constants["ALIGNMENT"] = ALIGNMENT if all(edge % ALIGNMENT == 0 for edge in edges) else 1
    lora_expand_kernel[(row_tiles * column_tiles, slices, num_active)](
        y, shrunk, b, ranks, bounds, *where, rows, y.shape[1], slots, column_tiles, BLOCK_N=BLOCK_N, num_warps=4,
        **constants,
    )  # fmt: skip
