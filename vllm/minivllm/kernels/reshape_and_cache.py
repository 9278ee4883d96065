"""Writing the paged KV cache: `reshape_and_cache` (lesson 02).

Layouts
    key, value    [tokens, kv_heads, head_dim], last two dimensions contiguous (a slice of a fused QKV output will do)
    caches        [blocks, block_size, kv_heads, head_dim], a block contiguous
    scales        of int8 caches: fp32 [blocks, kv_heads, block_size], one for each key and one for each value
    slot_mapping  int64 or int32 [tokens]: block × block_size + offset; −1 marks a padding token, which is not written

Grid
    reshape_and_cache   a program for each token: it moves that token's K and V for all heads
    ... to int8         a program for each (token, head): finds K's and V's largest magnitude, writes scale = largest / 127
                        and the nearest integers

Must move: each K and V byte read once and written once, 4 × tokens × kv_heads × head_dim × bytes;
no arithmetic. In int8 what is written, and later read at every step, is head_dim + 4 bytes a head
instead. Rounding is off by half a scale at most, 1/254 of the head's largest number: one outlier
spoils its own token and head, not the cache. fp8 has no scale: numbers beyond its largest, 448, are
written as that.

In vLLM v0.33.0: `vllm/v1/attention/ops/triton_reshape_and_cache_flash.py`,
`reshape_and_cache_kernel_flash`; "int8_per_token_head" and "fp8" among its values of
`kv_cache_dtype`.

The CPU twin is in `cpu/cache_calls.py`; `benchmarks/kernels.py` measures it beside a plain copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.kernels.attention_arguments import QUANTIZED, check_scales
from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.cache_calls import FP8_LARGEST, CacheWrite, write_cpu
from minivllm.platforms.triton_utils import tl, triton


@triton.jit
def reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride,
    value_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # kv_heads × head_dim: what one token writes
    PADDED_WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,  # number that the caches can hold; 0: they are of the keys' own type
):
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:  # else the token is padding
        column = tl.arange(0, PADDED_WIDTH)
        mask = column < WIDTH
        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * WIDTH + column
        keys = tl.load(key + token * key_stride + column, mask=mask)
        values = tl.load(value + token * value_stride + column, mask=mask)
        if LARGEST > 0:
            keys = tl.clamp(keys.to(tl.float32), -LARGEST, LARGEST, tl.PropagateNan.ALL)
            values = tl.clamp(values.to(tl.float32), -LARGEST, LARGEST, tl.PropagateNan.ALL)
        tl.store(key_cache + target, keys.to(key_cache.dtype.element_ty), mask=mask)
        tl.store(value_cache + target, values.to(value_cache.dtype.element_ty), mask=mask)


@triton.jit
def quantize_head(source, target, scale_target, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Quantize one head to integers from −127 to 127, and write the scale that dequantizes them, or
    NaN if the head has one.
    """
    dim = tl.arange(0, PADDED_DIM)
    numbers = tl.load(source + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    broken = tl.max((numbers != numbers).to(tl.int32), 0)  # a NaN, which the maximum may pass over
    largest = tl.where(broken > 0, float("nan"), largest)
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    tl.store(target + dim, tl.floor(numbers * inverse + 0.5).to(tl.int8), mask=dim < HEAD_DIM)
    tl.store(scale_target, largest / 127.0)


@triton.jit
def quantize_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    key_stride,
    value_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Grid (tokens, kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:  # else the token is padding
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = block * block_stride + (offset * heads + head) * HEAD_DIM
        scale = (block * heads + head) * BLOCK_SIZE + offset
        keys = key + token * key_stride + head * HEAD_DIM
        values = value + token * value_stride + head * HEAD_DIM
        quantize_head(keys, key_cache + target, key_scales + scale, HEAD_DIM, PADDED_DIM)
        quantize_head(values, value_cache + target, value_scales + scale, HEAD_DIM, PADDED_DIM)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> None:
    """Write each token's key and value into its slot. `backend` is "triton" or "cpu"; None follows
    the tensors' device.

    Tokens beyond `len(slot_mapping)` are not written. Two tokens must not share a slot. int8 caches
    need the scales. `checked`: skip the checks, since a call with the same shapes and types has
    passed them (a step's first layer).

    Raises:
        MinivllmError: shapes do not match, or the backend is unknown.
        IndexError: a slot is not in the caches. The GPU kernel does not check, and would write
            out of bounds.
    """
    if not checked:
        _check_write(key, value, key_cache, value_cache, slot_mapping)
        check_scales(key_cache, key_scales, value_scales)
    if choose_backend(backend, key) == "cpu":
        write_cpu(CacheWrite(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales))
        return
    if key_cache.stride()[1:] != (key_cache.shape[2] * key_cache.shape[3], key_cache.shape[3], 1):
        raise MinivllmError("a block of the cache must be contiguous")
    tokens = len(slot_mapping)
    if not tokens:
        return
    _, heads, head_dim = key.shape
    tensors = (key, value, key_cache, value_cache)
    strides = (key.stride(0), value.stride(0), key_cache.stride(0))
    block_size = key_cache.shape[1]
    if key_scales is not None:
        quantize_and_cache_kernel[(tokens, heads)](
            *tensors, key_scales, value_scales, slot_mapping, *strides,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            num_warps=1,
        )  # fmt: skip
        return
    reshape_and_cache_kernel[(tokens,)](
        *tensors, slot_mapping, *strides,
        BLOCK_SIZE=block_size,
        WIDTH=heads * head_dim,
        PADDED_WIDTH=triton.next_power_of_2(heads * head_dim),
        LARGEST=FP8_LARGEST if key_cache.dtype == torch.float8_e4m3fn else 0.0,
    )  # fmt: skip


def _check_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    if key.shape != value.shape or key.dim() != 3 or key_cache.dim() != 4 or key.shape[1:] != key_cache.shape[2:]:
        raise MinivllmError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be [tokens, kv_heads, head_dim] with the "
            f"last two sizes of the cache {tuple(key_cache.shape)}, [blocks, block_size, kv_heads, head_dim]"
        )
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise MinivllmError("key and value caches must have the same shape and strides")
    if not (key.dtype == value.dtype and key_cache.dtype == value_cache.dtype in (key.dtype, *QUANTIZED)):
        raise MinivllmError(
            f"keys are {key.dtype}, values {value.dtype}, caches {key_cache.dtype}: they must have the same dtype, "
            "unless the caches are int8 or float8_e4m3fn"
        )
    if len(slot_mapping) > len(key):
        raise MinivllmError(f"{len(slot_mapping)} slots for {len(key)} tokens")
    if not all(rows[:1].is_contiguous() for rows in (key, value)):
        raise MinivllmError("the heads of a token must be contiguous in key and value (call .contiguous())")
