"""The CPU counterparts of `reshape_and_cache.py`'s kernels, compiled by numba: K and V as they are,
and to int8.

Plain loops over arrays, on one thread: a step writes few bytes, and to wake another thread takes
longer. Both return a slot that is not in the caches, or 0; −1 marks a token that is not written.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from minivllm.kernels.cpu.programs import compile_function

jit = njit(error_model="numpy", nogil=True)  # no fastmath: the integers must equal the kernel's exactly


@jit
def quantize_head(target, source):
    """Quantize one head to integers from −127 to 127. Return the scale that dequantizes them:
    NaN if any number was.
    """
    largest = np.float32(0.0)
    broken = False
    for dim in range(len(source)):
        number = source[dim]
        largest = max(largest, abs(number))
        broken |= number != number
    if broken:
        largest = np.float32(np.nan)
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for dim in range(len(source)):
        target[dim] = np.int8(np.floor(source[dim] * inverse + np.float32(0.5)))
    return largest / np.float32(127.0)


def _copy_tokens(slots, key, value, key_cache, value_cache):
    num_blocks, block_size, kv_heads, head_dim = key_cache.shape
    beyond = 0
    for token in range(len(slots)):
        block, offset = slots[token] // block_size, slots[token] % block_size
        if block >= num_blocks:
            beyond = slots[token]
        elif block >= 0:
            for head in range(kv_heads):
                for dim in range(head_dim):
                    key_cache[block, offset, head, dim] = key[token, head, dim]
                for dim in range(head_dim):
                    value_cache[block, offset, head, dim] = value[token, head, dim]
    return beyond


def _quantize_tokens(slots, key, value, key_cache, value_cache, key_scales, value_scales):
    num_blocks, block_size, kv_heads = key_cache.shape[:3]
    beyond = 0
    for token in range(len(slots)):
        block, offset = slots[token] // block_size, slots[token] % block_size
        if block >= num_blocks:
            beyond = slots[token]
        elif block >= 0:
            for head in range(kv_heads):
                key_scales[block, head, offset] = quantize_head(key_cache[block, offset, head], key[token, head])
                value_scales[block, head, offset] = quantize_head(value_cache[block, offset, head], value[token, head])
    return beyond


copy_tokens = compile_function(_copy_tokens)
quantize_tokens = compile_function(_quantize_tokens)
