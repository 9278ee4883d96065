"""Writing the paged KV cache: `reshape_and_cache` (lesson 02) and `copy_blocks` (lessons 02, 08, 11).

Layouts
    key, value    [tokens, kv_heads, head_dim], last two dimensions contiguous (a slice of a fused QKV output will do)
    caches        [blocks, block_size, kv_heads, head_dim], a block contiguous
    slot_mapping  int64 or int32 [tokens]: block × block_size + offset; −1 marks a padding token, which is not written

Grid
    reshape_and_cache   one program a token: it moves that token's K and V for all heads
    copy_blocks         one program a (pair, 4,096 elements of the block)

Must move: each K and V byte read once and written once, 4 × tokens × kv_heads × head_dim × bytes; no arithmetic.

In vLLM v0.33.0: `vllm/v1/attention/ops/triton_reshape_and_cache_flash.py`, `reshape_and_cache_kernel_flash`.

The CPU twin is `index_copy_`, which `benchmarks/kernels.py` measures beside `index_put_` and a plain copy.
"""

from __future__ import annotations

import torch

from minivllm.errors import MinivllmError
from minivllm.lab.gpu import tl, triton

COPY_CHUNK = 4096


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
):
    """Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, PADDED_WIDTH)
        mask = column < WIDTH
        target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * WIDTH + column
        tl.store(key_cache + target, tl.load(key + token * key_stride + column, mask=mask), mask=mask)
        tl.store(value_cache + target, tl.load(value + token * value_stride + column, mask=mask), mask=mask)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Write each token's key and value into its slot. `backend` "triton" or "cpu"; None follows the tensors' device.

    Tokens beyond `len(slot_mapping)` are not written. Two tokens must not share a slot.

    Raises:
        MinivllmError: shapes that do not belong together; an unknown backend.
    """
    _check_write(key, value, key_cache, value_cache, slot_mapping)
    if choose_backend(backend, key) == "cpu":
        _write_cpu(key, value, key_cache, value_cache, slot_mapping)
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
        )


def _write_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    tokens = len(slot_mapping)
    key, value, slots = key[:tokens], value[:tokens], slot_mapping.long()
    if tokens and int(slots.min()) < 0:
        real = slots >= 0
        key, value, slots = key[real], value[real], slots[real]
    for source, cache in ((key, key_cache), (value, value_cache)):
        if cache.is_contiguous():
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, source)
        else:
            block_size = cache.shape[1]
            cache[slots // block_size, slots % block_size] = source


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
    if not (key.dtype == value.dtype == key_cache.dtype == value_cache.dtype):
        raise MinivllmError(f"keys are {key.dtype}, values {value.dtype}, caches {key_cache.dtype}: they must be alike")
    if len(slot_mapping) > len(key):
        raise MinivllmError(f"{len(slot_mapping)} slots for {len(key)} tokens")
    if key.stride(2) != 1 or key.stride(1) != key.shape[2] or value.stride()[1:] != key.stride()[1:]:
        raise MinivllmError("the heads of a token must lie side by side in key and value (call .contiguous())")
    if key_cache[0].numel() and not key_cache[0].is_contiguous():
        raise MinivllmError("a block of the cache must be contiguous")


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
    on write); `pairs` int64 or int32 `[n, 2]`. All copies happen at once: no block may be written twice, and none
    written that another pair reads.

    Raises:
        MinivllmError: shapes or types that do not belong together; an unknown backend.
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
    """ "triton" or "cpu": as asked, else by where the tensor lies."""
    if backend is None:
        return "triton" if tensor.is_cuda else "cpu"
    if backend not in ("triton", "cpu"):
        raise MinivllmError(f'unknown backend {backend!r}: use "triton" or "cpu"')
    return backend
