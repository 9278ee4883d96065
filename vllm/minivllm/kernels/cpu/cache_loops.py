"""The CPU counterparts of `reshape_and_cache.py`'s kernels, compiled by numba: K and V as they are,
and to int8.

One program takes all tokens: a step writes few bytes, and to wake another thread takes longer. A
slot of −1 marks a token that is not written; one that is not in the caches is left in a cell for
the caller.
"""

from __future__ import annotations

import numpy as np

from minivllm.kernels.cpu.cells import CacheCells
from minivllm.kernels.cpu.programs import array_at, counter_of, exact_jit, programs, take_programs


@exact_jit
def copy_head(cache, at, source, source_at, head_dim):
    """Copy one head's numbers."""
    for dim in range(head_dim):
        cache[at + dim] = source[source_at + dim]


@exact_jit
def quantize_head(cache, at, source, source_at, head_dim):
    """Quantize one head to integers from −127 to 127. Return the scale that dequantizes them:
    NaN if any number was.
    """
    largest = np.float32(0.0)
    broken = False
    for dim in range(head_dim):
        number = source[source_at + dim]
        largest = max(largest, abs(number))
        broken |= number != number
    if broken:
        largest = np.float32(np.nan)
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for dim in range(head_dim):
        cache[at + dim] = np.int8(np.floor(source[source_at + dim] * inverse + np.float32(0.5)))
    return largest / np.float32(127.0)


@exact_jit
def write_tokens(cells, number, element, key_scales, value_scales):
    """Write the tokens' keys and values, of the type `number`, to their slots in caches of the type
    `element`: as they are if the scales are None, which numba knows when it compiles this.
    """
    slots = array_at(cells.slots, cells.tokens, np.int64)
    key, value = array_at(cells.key, 1, number), array_at(cells.value, 1, number)
    key_cache, value_cache = array_at(cells.key_cache, 1, element), array_at(cells.value_cache, 1, element)
    for token in range(cells.tokens):
        block, offset = slots[token] // cells.slots_per_block, slots[token] % cells.slots_per_block
        if block >= cells.num_blocks:
            cells.beyond = slots[token]
        if block < 0 or block >= cells.num_blocks:
            continue
        for head in range(cells.kv_heads):
            at = block * cells.block_stride + offset * cells.slot_stride + head * cells.head_stride
            key_at = token * cells.key_stride + head * cells.key_head_stride
            value_at = token * cells.value_stride + head * cells.value_head_stride
            if key_scales is None:
                copy_head(key_cache, at, key, key_at, cells.head_dim)
                copy_head(value_cache, at, value, value_at, cells.head_dim)
            else:
                scale_at = (block * cells.kv_heads + head) * cells.slots_per_block + offset
                key_scales[scale_at] = quantize_head(key_cache, at, key, key_at, cells.head_dim)
                value_scales[scale_at] = quantize_head(value_cache, at, value, value_at, cells.head_dim)


def copy_tokens(cells, element):
    """Copy the tokens' keys and values to caches of the same type."""
    for _program in take_programs(counter_of(cells), 1):
        write_tokens(cells, element, element, None, None)


def quantize_tokens(cells):
    """Quantize the tokens' keys and values, which are fp32, and store the scales."""
    key_scales, value_scales = array_at(cells.key_scales, 1, np.float32), array_at(cells.value_scales, 1, np.float32)
    for _program in take_programs(counter_of(cells), 1):
        write_tokens(cells, np.float32, np.int8, key_scales, value_scales)


# Without fastmath: the integers must equal the kernel's exactly.
copies_of = programs(CacheCells, copy_tokens, exact_jit)
quantizer = programs(CacheCells, quantize_tokens, exact_jit)
