"""Arguments of each compiled loop: a row of int64 cells, named here once for both the caller and the loop.

The first cell is always `next_program`, the counter from which threads take programs; a call leaves it out, so that it
begins at 0. Addresses are of a tensor's first element, 0 if there is no tensor; strides count elements, not bytes.
"""

from __future__ import annotations

import ctypes
from typing import TypeVar

Kind = TypeVar("Kind", bound=ctypes.Structure)


def cells(kind: type[Kind]) -> type[Kind]:
    """Class decorator: the annotated names become int64 fields, behind `next_program`."""
    kind._fields_ = [(name, ctypes.c_int64) for name in ("next_program", *kind.__annotations__)]
    return kind


@cells
class AttentionCells(ctypes.Structure):
    """Arguments of `attention_loops.attend`; shapes as in `unified_attention.py`, q and out in fp32."""

    heads: int
    kv_heads: int
    head_dim: int
    slots_per_block: int
    num_seqs: int
    block_stride: int  # in the caches, as the next two
    slot_stride: int
    head_stride: int
    table_stride: int  # of a sequence in the block table
    q_stride: int  # of a token
    sliding_window: int
    query_start_loc: int  # from here on addresses
    seq_lens: int
    block_table: int
    q: int
    out: int
    scale_and_cap: int  # of two fp32 numbers: the scale in units of log2, and the soft cap or 0
    k_cache: int
    v_cache: int
    k_scales: int
    v_scales: int


@cells
class PanelLinearCells(ctypes.Structure):
    """Arguments of `panel_linear_loops.multiply_panels`."""

    rows: int
    outputs: int
    width: int  # of a row of x
    parts: int  # panels per output: 2 for gate and up, else 1
    gated: int  # 1: out is silu(gate) × up; 0: both side by side
    x: int  # from here on addresses
    out: int
    panels: int
    bias: int  # fp32, of all panels


@cells
class QuantizedLinearCells(ctypes.Structure):
    """Arguments of `quantized_linear_loops.multiply_integers`."""

    rows: int
    outputs: int
    width: int  # of a row of the weight
    group: int  # numbers that share a scale
    x: int  # from here on addresses; x and out are fp32
    out: int
    packed: int
    scales: int


@cells
class LoRALinearCells(ctypes.Structure):
    """Arguments of `lora_loops.add_adapters`; shapes as in `lora_linear.py`."""

    tiles: int  # as the next five, of the step; the others are of the linear
    x_stride: int  # of a row
    y: int  # an address, as the next three
    x: int
    indices: int  # int32
    tile_table: int  # int64 [3, tiles]: slot, first place, rows
    slices: int
    slots: int
    max_rank: int
    width: int  # of a row of x
    outputs: int
    a: int  # from here on addresses
    b: int
    ranks: int  # int32, as bounds
    bounds: int


@cells
class NormCells(ctypes.Structure):
    """Arguments of `elementwise_loops.add_rms_norms`."""

    tokens: int
    width: int
    out: int  # from here on addresses
    residual: int
    x: int
    weight: int
    eps: int  # of one fp32 number


@cells
class GateCells(ctypes.Structure):
    """Arguments of `elementwise_loops.multiply_gates`."""

    tokens: int
    width: int  # of a row of out; one of gate_up has twice as many
    out: int  # from here on addresses
    gate_up: int


@cells
class RotationCells(ctypes.Structure):
    """Arguments of `elementwise_loops.rotate_tokens`."""

    tokens: int
    num_heads: int
    head_dim: int
    token_stride: int
    heads: int  # from here on addresses
    table: int
    positions: int  # int64


@cells
class RejectionCells(ctypes.Structure):
    """Arguments of `rejection_loops.walk_drafts`; shapes as in `rejection_sample.py`, logits contiguous."""

    requests: int
    rows: int
    vocab: int
    width: int  # of the output
    out: int  # from here on addresses: int64
    target_logits: int
    draft_logits: int  # 0: there are none
    draft_token_ids: int  # int64, as the next two
    starts: int  # each request's first row, [requests + 1]
    likeliest: int  # of each row of target_logits
    largest_of_draft: int  # fp32, each row's largest logit
    is_greedy: int  # uint8
    keys: int  # uint32


@cells
class BlockCopyCells(ctypes.Structure):
    """Arguments of `block_copy_loops.copy_regions`."""

    blocks: int
    regions: int
    capacity: int  # records that the staging buffer has room for
    gather: int  # 1: to the staging buffer; 0: from it
    block_major: int
    table: int  # from here on addresses: int64, as the next two
    block_ids: int
    slots: int
    staging: int
