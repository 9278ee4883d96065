"""Writing the paged KV cache: `reshape_and_cache` (lesson 02) and `copy_blocks` (lessons 02, 08, 11).

Layouts
    key, value    [tokens, kv_heads, head_dim], last two dimensions contiguous (a slice of a fused QKV output will do)
    caches        [blocks, block_size, kv_heads, head_dim], a block contiguous
    scales        of int8 caches: fp32 [blocks, kv_heads, block_size], one for each key and one for each value
    slot_mapping  int64 or int32 [tokens]: block × block_size + offset; −1 marks a padding token, which is not written

Grid
    reshape_and_cache   a program for each token: it moves that token's K and V for all heads
    ... to int8         a program for each (token, head): it finds K's and V's largest number, writes scale = largest / 127
                        and the nearest integers
    copy_blocks         a program for each (pair, 4,096 elements of the block)

Must move: each K and V byte read once and written once, 4 × tokens × kv_heads × head_dim × bytes; no arithmetic. In int8
what is written, and later read at every step, is head_dim + 4 bytes a head instead. Rounding is off by half a scale
at most, 1/254 of the head's largest number: one outlier spoils its own token and head, not the cache. fp8 has no scale:
numbers beyond its largest, 448, are written as that.

In vLLM v0.33.0: `vllm/v1/attention/ops/triton_reshape_and_cache_flash.py`, `reshape_and_cache_kernel_flash`;
"int8_per_token_head" and "fp8" among its values of `kv_cache_dtype`.

The CPU twin is in `cpu/cache_calls.py`; `benchmarks/kernels.py` measures it beside a plain copy.
"""

from __future__ import annotations

import torch

from minivllm.errors import MinivllmError
from minivllm.kernels.cpu.cache_calls import FP8_LARGEST, write_cpu
from minivllm.platforms.triton_utils import tl, triton

COPY_CHUNK = 4096
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
"""Dtypes a cache may have besides the model's own."""


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
    if slot >= 0:
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
    """Quantize one head to integers from −127 to 127, and write the scale that dequantizes them: NaN if one was."""
    dim = tl.arange(0, PADDED_DIM)
    numbers = tl.load(source + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    broken = tl.max((numbers != numbers).to(tl.int32), 0)
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
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = block * block_stride + (offset * heads + head) * HEAD_DIM
        scale = (block * heads + head) * BLOCK_SIZE + offset
        source = head * HEAD_DIM
        quantize_head(key + token * key_stride + source, key_cache + target, key_scales + scale, HEAD_DIM, PADDED_DIM)
        quantize_head(
            value + token * value_stride + source, value_cache + target, value_scales + scale, HEAD_DIM, PADDED_DIM
        )


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    backend: str | None = None,
    checked: bool = False,
) -> None:
    """Write each token's key and value into its slot. `backend` "triton" or "cpu"; None follows the tensors' device.

    Tokens beyond `len(slot_mapping)` are not written. Two tokens must not share a slot. int8 caches need the scales.
    `checked`: skip the checks, since a call with the same shapes and types has passed them (a step's first layer).

    Raises:
        MinivllmError: shapes do not match, or the backend is unknown.
        IndexError: a slot is not in the caches. A GPU's kernel does not look: it would write to foreign memory.
    """
    if not checked:
        _check_write(key, value, key_cache, value_cache, slot_mapping)
        check_scales(key_cache, key_scales, value_scales)
    if choose_backend(backend, key) == "cpu":
        write_cpu(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales)
        return
    if key_scales is not None and len(slot_mapping):
        quantize_and_cache_kernel[(len(slot_mapping), key.shape[1])](
            key,
            value,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            key_cache.stride(0),
            BLOCK_SIZE=key_cache.shape[1],
            HEAD_DIM=key.shape[2],
            PADDED_DIM=triton.next_power_of_2(key.shape[2]),
            num_warps=1,
        )
        return
    width = key.shape[1] * key.shape[2]
    if len(slot_mapping):
        reshape_and_cache_kernel[(len(slot_mapping),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            key.stride(0),
            value.stride(0),
            key_cache.stride(0),
            BLOCK_SIZE=key_cache.shape[1],
            WIDTH=width,
            PADDED_WIDTH=triton.next_power_of_2(width),
            LARGEST=FP8_LARGEST if key_cache.dtype == torch.float8_e4m3fn else 0.0,
        )


def _check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    if key.shape != value.shape or key.dim() != 3 or key_cache.dim() != 4 or key.shape[1:] != key_cache.shape[2:]:
        raise MinivllmError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must both be [tokens, kv_heads, head_dim] with the "
            f"last two of the cache {tuple(key_cache.shape)}, which is [blocks, block_size, kv_heads, head_dim]"
        )
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise MinivllmError("key and value caches must have the same shape and strides")
    if not (key.dtype == value.dtype and key_cache.dtype == value_cache.dtype in (key.dtype, *QUANTIZED)):
        raise MinivllmError(
            f"keys are {key.dtype}, values {value.dtype}, caches {key_cache.dtype}: they must be alike, "
            "or the caches int8 or float8_e4m3fn"
        )
    if len(slot_mapping) > len(key):
        raise MinivllmError(f"{len(slot_mapping)} slots for {len(key)} tokens")
    if not all(one[:1].is_contiguous() for one in (key, value)):
        raise MinivllmError("the heads of a token must lie side by side in key and value (call .contiguous())")
    if key_cache.stride()[1:] != (key_cache.shape[2] * key_cache.shape[3], key_cache.shape[3], 1):
        raise MinivllmError("a block of the cache must be contiguous")


def check_scales(cache: torch.Tensor, *scales: torch.Tensor | None) -> None:
    """Reject scales that are missing or do not match the caches `[blocks, block_size, kv_heads, head_dim]`."""
    blocks, block_size, kv_heads, _ = cache.shape
    wanted = (blocks, kv_heads, block_size)
    for one in scales:
        if (one is None) != (cache.dtype != torch.int8):
            raise MinivllmError(f"caches of int8 have scales, and no others do; these are {cache.dtype}")
        if one is not None and (one.shape != wanted or one.dtype != torch.float32 or not one.is_contiguous()):
            raise MinivllmError(
                f"scales must be contiguous float32 [blocks, kv_heads, block_size] = {list(wanted)}, "
                f"got {one.dtype} {list(one.shape)}"
            )


@triton.jit
def copy_blocks_kernel(source, target, pairs, source_stride, target_stride, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (pairs, chunks of a block)."""
    pair = tl.program_id(0)
    element = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    read = tl.load(pairs + 2 * pair).to(tl.int64) * source_stride
    written = tl.load(pairs + 2 * pair + 1).to(tl.int64) * target_stride
    block = tl.load(source + read + element, mask=element < SIZE)
    tl.store(target + written + element, block, mask=element < SIZE)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, backend: str | None = None) -> None:
    """`target[b] = source[a]` for every (a, b) in `pairs`, all in one launch.

    `source` and `target` `[blocks, ...]` of the same dtype and block shape on one device, often the same tensor (copy
    on write); `pairs` int64 or int32 `[n, 2]`. All copies happen at once: no block may be written twice, and no block
    that one pair reads may be written by another.

    Raises:
        MinivllmError: shapes or types do not match, or the backend is unknown.
    """
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise MinivllmError(
            f"blocks of {tuple(source.shape[1:])} {source.dtype} cannot be copied to blocks of "
            f"{tuple(target.shape[1:])} {target.dtype}"
        )
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise MinivllmError(f"pairs must be [n, 2] (source block, target block), got {tuple(pairs.shape)}")
    if choose_backend(backend, source) == "cpu":
        target.index_copy_(0, pairs[:, 1].long(), source.index_select(0, pairs[:, 0].long()))
        return
    if not (source[0].is_contiguous() and target[0].is_contiguous()):
        raise MinivllmError("blocks must be contiguous")
    size = source[0].numel()
    if len(pairs):
        copy_blocks_kernel[(len(pairs), triton.cdiv(size, COPY_CHUNK))](
            source, target, pairs.contiguous(), source.stride(0), target.stride(0), SIZE=size, CHUNK=COPY_CHUNK
        )


def choose_backend(backend: str | None, tensor: torch.Tensor) -> str:
    """ "triton" or "cpu": as requested, else according to the tensor's device."""
    if backend is None:
        return "triton" if tensor.is_cuda else "cpu"
    if backend not in ("triton", "cpu"):
        raise MinivllmError(f'unknown backend {backend!r}: use "triton" or "cpu"')
    return backend
