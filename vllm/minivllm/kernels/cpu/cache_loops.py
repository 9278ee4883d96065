"""The twins of `reshape_and_cache.py`'s writing kernels for a CPU, compiled by numba. A program takes some tokens.

They run on the block of int64 that `cache_calls.py` writes: the next program; tokens, block_size, kv_heads, head_dim;
[5] numbers from token to token in key and in value, from block to block in the caches; [8] addresses of slot_mapping
(int64), key, value, both caches, [13] both scales (0: none). Where there are scales, keys and values are quantized, else
copied as they are: counted in words of 4 bytes, and moved as float32, whatever they are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from minivllm.kernels.cpu.lanes import load, store
from minivllm.kernels.cpu.programs import array_at, compile_programs, sources_changed, take_number

TOKENS = 32  # of a program
BLOCK_SIZE = 15  # numbers in the block that the programs read
jit = njit(error_model="numpy", nogil=True)  # no fastmath: integers must be the kernel's, to the last


@jit
def copy_row(target, at, source, start, width):
    """One token's key or value, a line of the processor's cache at a time."""
    lines = width // 16 * 16
    for index in range(0, lines, 16):
        store(target, at + index, load(source, start + index))
    for index in range(lines, width):
        target[at + index] = source[start + index]


@jit
def quantize_head(target, at, source, start, head_dim):
    """One head's numbers as integers from −127 to 127. Returns the scale that makes them numbers again."""
    largest = np.float32(0.0)
    for dim in range(head_dim):
        largest = max(largest, abs(source[start + dim]))
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for dim in range(head_dim):
        target[at + dim] = np.int8(np.floor(source[start + dim] * inverse + np.float32(0.5)))
    return largest / np.float32(127.0)


@jit
def run_copies(block):
    """Take programs until none is left; a slot of −1 is no slot."""
    tokens, block_size, width = block[1], block[2], block[3] * block[4]
    key_stride, value_stride, block_stride = block[5], block[6], block[7]
    slots, key, value = array_at(block[8], tokens, np.int64), *_floats(block[9], block[10])
    key_cache, value_cache = _floats(block[11], block[12])
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            if slots[token] >= 0:
                at = slots[token] // block_size * block_stride + slots[token] % block_size * width
                copy_row(key_cache, at, key, token * key_stride, width)
                copy_row(value_cache, at, value, token * value_stride, width)


@jit
def run_quantizations(block):
    """Take programs until none is left: keys and values of float32 into caches of int8, and their scales."""
    tokens, block_size, kv_heads, head_dim = block[1], block[2], block[3], block[4]
    key_stride, value_stride, block_stride = block[5], block[6], block[7]
    slots, key, value = array_at(block[8], tokens, np.int64), *_floats(block[9], block[10])
    key_cache, value_cache = array_at(block[11], 1, np.int8), array_at(block[12], 1, np.int8)
    key_scales, value_scales = _floats(block[13], block[14])
    while True:
        first = take_number(block) * TOKENS
        if first >= tokens:
            return
        for token in range(first, min(first + TOKENS, tokens)):
            if slots[token] < 0:
                continue
            place, offset = slots[token] // block_size, slots[token] % block_size
            for head in range(kv_heads):
                at = place * block_stride + (offset * kv_heads + head) * head_dim
                scale_at = (place * kv_heads + head) * block_size + offset
                start = head * head_dim
                key_scale = quantize_head(key_cache, at, key, token * key_stride + start, head_dim)
                value_scale = quantize_head(value_cache, at, value, token * value_stride + start, head_dim)
                key_scales[scale_at], value_scales[scale_at] = key_scale, value_scale


@jit
def _floats(first, second):
    return array_at(first, 1, np.float32), array_at(second, 1, np.float32)


@functools.cache
def programs() -> Any:
    """`run_quantizations` where the block has scales, else `run_copies`: a C function of the block's address."""
    changed = sources_changed()

    def programs(address):
        _ = changed
        block = array_at(address, BLOCK_SIZE, np.int64)
        if block[13] != 0:
            run_quantizations(block)
        else:
            run_copies(block)

    return compile_programs(programs)
