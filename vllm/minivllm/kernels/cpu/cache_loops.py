"""The CPU counterparts of `reshape_and_cache.py`'s kernels, compiled by numba: K and V as they are, and to int8."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from minivllm.kernels.cpu.cells import CacheCells
from minivllm.kernels.cpu.programs import (
    array_at,
    cells_at,
    compile_programs,
    layout_of,
    sources_changed,
    take_number,
)

TOKENS = 32  # per program
CELLS = layout_of(CacheCells)
jit = njit(error_model="numpy", nogil=True)  # no fastmath: the integers must equal the kernel's exactly


@jit
def is_written(cells, slot):
    """Whether a slot is in the cache. −1 marks a token that is not written; a slot beyond the cache is noted."""
    if slot >= cells.slots:
        cells.beyond = slot
    return 0 <= slot < cells.slots


@jit
def copy_tokens(cells, key, value, key_cache, value_cache):
    """Run programs until none are left: write keys and values as they are."""
    tokens, block_size, width = cells.tokens, cells.slots_per_block, cells.kv_heads * cells.head_dim
    slots = array_at(cells.slot_mapping, tokens, np.int64)
    while True:
        first = take_number(cells) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            if not is_written(cells, slots[token]):
                continue
            at = slots[token] // block_size * cells.block_stride + slots[token] % block_size * width
            key_at, value_at = token * cells.key_stride, token * cells.value_stride
            for i in range(width):
                key_cache[at + i] = key[key_at + i]
            for i in range(width):
                value_cache[at + i] = value[value_at + i]


@jit
def quantize_head(target, at, source, start, head_dim):
    """Quantize one head to integers from −127 to 127. Returns the scale that dequantizes them: NaN if one of them was."""
    largest, broken = np.float32(0.0), False
    for dim in range(head_dim):
        number = source[start + dim]
        largest = max(largest, abs(number))
        broken |= number != number
    if broken:
        largest = np.float32(np.nan)
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for dim in range(head_dim):
        target[at + dim] = np.int8(np.floor(source[start + dim] * inverse + np.float32(0.5)))
    return largest / np.float32(127.0)


@jit
def quantize_tokens(cells):
    """Run programs until none are left: write fp32 keys and values to int8 caches, with their scales."""
    tokens, block_size, kv_heads, head_dim = cells.tokens, cells.slots_per_block, cells.kv_heads, cells.head_dim
    slots = array_at(cells.slot_mapping, tokens, np.int64)
    key, value = array_at(cells.key, 1, np.float32), array_at(cells.value, 1, np.float32)
    key_cache, value_cache = array_at(cells.key_cache, 1, np.int8), array_at(cells.value_cache, 1, np.int8)
    key_scales, value_scales = array_at(cells.key_scales, 1, np.float32), array_at(cells.value_scales, 1, np.float32)
    while True:
        first = take_number(cells) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            if not is_written(cells, slots[token]):
                continue
            block, offset = slots[token] // block_size, slots[token] % block_size
            key_at, value_at = token * cells.key_stride, token * cells.value_stride
            for head in range(kv_heads):
                at = block * cells.block_stride + (offset * kv_heads + head) * head_dim
                scale_at, start = (block * kv_heads + head) * block_size + offset, head * head_dim
                key_scales[scale_at] = quantize_head(key_cache, at, key, key_at + start, head_dim)
                value_scales[scale_at] = quantize_head(value_cache, at, value, value_at + start, head_dim)


@functools.cache
def copies_of(element: Any) -> Any:
    """Compiled `copy_tokens` of numbers as large as `element`; takes `CacheCells`."""
    changed = sources_changed()

    def copies(address):
        _ = changed
        cells = cells_at(address, CELLS)
        key, value = array_at(cells.key, 1, element), array_at(cells.value, 1, element)
        key_cache, value_cache = array_at(cells.key_cache, 1, element), array_at(cells.value_cache, 1, element)
        copy_tokens(cells, key, value, key_cache, value_cache)

    return compile_programs(copies)


@functools.cache
def quantizations() -> Any:
    """Compiled `quantize_tokens`; takes `CacheCells`."""
    changed = sources_changed()

    def quantizations(address):
        _ = changed
        quantize_tokens(cells_at(address, CELLS))

    return compile_programs(quantizations)
