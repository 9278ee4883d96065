"""Arguments of each compiled loop: a row of int64 cells, named here once for both the caller and
the loop.

The first cell is always `next_program`, the counter from which threads take programs; a call leaves
it out, so that it begins at 0. Then come numbers, of which strides count elements, not bytes, and
fp32 numbers are given by their bits (`bits_of`); then addresses: of a tensor's first element, 0 if
there is no tensor. A call thus reads nothing but its cells and tensors, so a list of them can be
run again (`replay.py`).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any


def bits_of(number: float) -> int:
    """Return the bits of an fp32 number, for a cell that `programs.float_of` reads."""
    return struct.unpack("<i", struct.pack("<f", number))[0]


def _cells(numbers: str, addresses: str) -> Any:
    names = ("next_program", *numbers.split(), *addresses.split())
    return type("Cells", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_int64) for name in names]})


# Arguments of `attention_loops.attend`; shapes as in `unified_attention.py`. `table_stride` is of a
# sequence in the block table, `q_stride` of a token; the other strides are of the caches. `scale`
# is an fp32 number in units of log2.
AttentionCells = _cells(
    "heads kv_heads head_dim slots_per_block num_seqs block_stride slot_stride head_stride table_stride q_stride "
    "sliding_window scale",
    "query_start_loc seq_lens block_table q out k_cache v_cache k_scales v_scales",
)

# Arguments of `cache_loops.write_tokens`; shapes as in `reshape_and_cache.py`. Strides are of key
# and value, then of both caches. The loop leaves a slot beyond the caches in `beyond`.
CacheCells = _cells(
    "tokens kv_heads head_dim num_blocks slots_per_block key_stride key_head_stride value_stride value_head_stride "
    "block_stride slot_stride head_stride beyond",
    "slots key value key_cache value_cache key_scales value_scales",
)

# Arguments of `panel_linear_loops.multiply_panels`. `width` is of a row of x; `parts` are panels
# per output, 2 for gate and up; if `gated`, out is silu(gate) × up, else both side by side. `bias`
# is fp32, of all panels.
PanelLinearCells = _cells("rows outputs width parts gated", "x out panels bias")

# Arguments of `quantized_linear_loops.multiply_integers`. `group` numbers share a scale; x and out
# are fp32.
QuantizedLinearCells = _cells("rows outputs width group", "x out packed scales")

# Arguments of `lora_loops.add_adapters`; shapes as in `lora_linear.py`. The first six are of the
# step, the others of the linear. `tile_table` is int64 [3, tiles]: slot, first place and rows of
# each; indices, ranks and bounds are int32.
LoRALinearCells = _cells(
    "tiles x_stride y x indices tile_table slices slots max_rank width outputs", "a b ranks bounds"
)

# Arguments of `elementwise_loops.py`'s `add_rms_norms`, `multiply_gates` and `rotate_tokens`. `eps`
# is an fp32 number; a row of gate_up has 2 × `width` numbers; positions are int64.
NormCells = _cells("tokens width eps", "out residual x weight")
GateCells = _cells("tokens width", "out gate_up")
RotationCells = _cells("tokens num_heads head_dim token_stride", "heads table positions")

# Arguments of `gumbel_loops.draw_rows`: logits are fp32 [rows, vocab], keys uint32 [rows, 2];
# token_ids, int64 [rows], hold each row's most likely token on entry, and the drawn one on return.
DrawCells = _cells("rows vocab", "logits keys token_ids")

# Arguments of `rejection_loops.walk_drafts`; shapes as in `rejection_sample.py`, logits contiguous.
# `width` is of the output. `likeliest` is of each row of target_logits, `largest_of_draft` each
# draft row's largest logit, fp32. out, draft ids, starts [requests + 1] and likeliest are int64,
# is_greedy uint8, keys uint32.
RejectionCells = _cells(
    "requests rows vocab width",
    "out target_logits draft_logits draft_token_ids starts likeliest largest_of_draft is_greedy keys",
)

# Arguments of `block_copy_loops.copy_regions`. `record` is in bytes; if `gather`, to the staging
# buffer, else from it. table, block_ids and slots are int64.
BlockCopyCells = _cells("blocks regions record gather", "table block_ids slots staging")

# Arguments of `replay_loops.replay`. `table` is int64 [calls, 8]: a function, its cells' address,
# and how many threads run it. `give_way` is a C function.
ReplayCells = _cells("calls", "table give_way")
