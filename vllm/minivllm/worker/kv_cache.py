"""The tensors that hold keys and values.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker.initialize_from_config`),
`vllm/v1/worker/gpu_model_runner.py` (`GPUModelRunner.initialize_kv_cache`).
"""

import contextlib
import math
import mmap
from typing import Any

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.config.cache import KV_CACHE_DTYPES, kv_cache_layout
from minivllm.errors import MinivllmError
from minivllm.platforms.device import device_name
from minivllm.platforms.device_memory import refuse_beyond_memory
from minivllm.worker.latent_attention import LatentCache
from minivllm.worker.paged_attention import LayerCache

# The torch dtype of cached keys and values for each `kv_cache_dtype`; "auto", not listed, is the
# model's own dtype.
STORED_AS = {name: getattr(torch, stored_as) for name, stored_as in KV_CACHE_DTYPES.items()}

HUGE_PAGE = 2 << 20  # bytes, on x86-64 and on arm64 with pages of 4 KiB


def check_kv_cache_dtype(kv_cache_dtype: str, device: torch.device, config: ModelConfig) -> None:
    """Reject an fp8 cache on a device without fp8, and any dtype but the model's own for latents.

    Raises:
        MinivllmError: the dtype is not supported; the message suggests an alternative.
    """
    if config.kv_lora_rank is not None and kv_cache_dtype != "auto":
        raise MinivllmError(
            f"kv_cache_dtype {kv_cache_dtype!r} is for per-head keys and values, but this model keeps latents (MLA): "
            'leave it out, or set "auto"'
        )
    if STORED_AS.get(kv_cache_dtype) != torch.float8_e4m3fn:
        return
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    raise MinivllmError(
        f"kv_cache_dtype {kv_cache_dtype!r} needs an NVIDIA GPU of compute capability 8.9 or above (Ada, Hopper, "
        f'Blackwell), but this engine runs on {device_name(device)}: use "int8", which is as small on any device'
    )


def allocate_kv_caches(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> list[LayerCache] | list[LatentCache]:
    """Allocate zeroed keys and values for every layer, each [num_blocks, block_size, kv_heads,
    head_dim].

    On a CPU that is a view: in memory, the slots of one head stand side by side (the layout that
    vLLM calls HND), so that a core reads the keys of one head in one run.

    An int8 cache also has scales for both, each [num_blocks, kv_heads, block_size], float32. A
    model with latent attention has one tensor per layer, [num_blocks, block_size, kv_lora_rank +
    qk_rope_head_dim], on every rank.

    Raises:
        MinivllmError: the device does not have that much memory.
    """
    kind, shapes = _layer_shapes(config, num_blocks, block_size, STORED_AS.get(kv_cache_dtype, dtype))
    layers = range(config.num_hidden_layers)
    refuse_beyond_memory(
        sum(math.prod(shape) * stored_as.itemsize for shape, stored_as in shapes) * len(layers),
        device,
        f"a KV cache of {num_blocks} blocks of {block_size} tokens",
        "use fewer blocks, or leave num_gpu_blocks_override out",
    )
    return [kind(*(_cache_tensor(shape, device, stored_as) for shape, stored_as in shapes)) for _ in layers]


def _layer_shapes(
    config: ModelConfig, num_blocks: int, block_size: int, stored_as: torch.dtype
) -> tuple[Any, list[tuple[tuple[int, ...], torch.dtype]]]:
    """Return the type of one layer's cache, and the shape and dtype of each of its tensors."""
    if config.kv_lora_rank is not None:
        return LatentCache, [((num_blocks, block_size, config.latent_width), stored_as)]
    heads = config.num_key_value_heads
    shapes = [((num_blocks, block_size, heads, config.head_dim), stored_as)] * 2
    if stored_as == torch.int8:
        # The scales of keys, and of values.
        shapes += [((num_blocks, heads, block_size), torch.float32)] * 2
    return LayerCache, shapes


def _cache_tensor(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if len(shape) == 4 and kv_cache_layout(device.type) == "HND":
        num_blocks, block_size, heads, head_dim = shape
        return _zeros((num_blocks, heads, block_size, head_dim), device, dtype).transpose(1, 2)
    return _zeros(shape, device, dtype)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros; on a CPU in pages that the system maps only when they are first written."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(shape)
    # The blocks of a sequence lie all over the cache: with larger pages, fewer reads miss the TLB.
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(shape)
