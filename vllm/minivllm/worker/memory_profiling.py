"""Memory, profiled once: what the weights and the largest step need, and how many cache blocks fit beside them.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker.determine_available_memory`, `initialize_from_config`).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory import Device, LedgerRow, MemoryLedger, memory_ledger
from minivllm.platforms.device import device_name
from minivllm.platforms.device_memory import available_memory, refuse_beyond_memory
from minivllm.worker.paged_attention import LayerCache

UNKNOWN_MEMORY = 4 * GIB
"""What a CPU engine takes to be available where the system does not say."""

STORED_AS = {
    "int8": torch.int8,
    "int8_per_token_head": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What keys and values are stored as under each `kv_cache_dtype` but "auto", under which it is the model's own type."""


@dataclass(frozen=True)
class MemoryUse:
    """One rank's memory, in bytes: what there is, and what goes to all but the cache; `dtype` is of the computation.

    Whether there are `cuda_graphs` is known, not yet what they take.

    `activation_peak` is what the largest step needs beside the weights, None where it could not be measured. Ranks that
    share a CPU have equal shares of its memory.
    """

    device_name: str
    device_memory: int
    outside_torch: int
    weights: int
    activation_peak: int | None
    dtype: str
    cuda_graphs: bool


def measure_memory(
    device: torch.device, ranks: int, *, dtype: str, weights: int, activation_peak: int | None, cuda_graphs: bool
) -> MemoryUse:
    """The device asked, and what is known of the rank added."""
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    else:
        name, memory = "CPU (memory that is available)", (available_memory() or UNKNOWN_MEMORY) // ranks
    if device.type == "cpu" and ranks > 1:
        name = f"{name}, one of {ranks} ranks' share"
    return MemoryUse(name, memory, _bytes_outside_torch(device), weights, activation_peak, dtype, cuda_graphs)


def profile_memory(
    config: ModelConfig,
    use: MemoryUse,
    *,
    tp: int,
    kv_cache_dtype: str,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
) -> MemoryLedger:
    """Shares out the memory of one of `tp` ranks. `config` is the whole model's. Activations are estimated where None.

    The pool never gets more blocks than `max_num_seqs` requests of `max_model_len` tokens could fill: on a CPU the
    memory that is not needed belongs to others.

    Raises:
        MinivllmError: one request of `max_model_len` tokens does not fit; the message says which length would.
    """
    ledger = memory_ledger(
        # Our cache keeps every token, whatever window a layer looks through.
        replace(config, sliding_window=None, layer_types=None),
        Device(use.device_name, use.device_memory),
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        tp=tp,
        kv_dtype=use.dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
        weight_dtype=use.dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        weights=use.weights,
        activation_peak=use.activation_peak,
        non_torch=use.outside_torch,
        cuda_graphs=None if use.cuda_graphs else 0,
    )
    most_blocks = max_num_seqs * math.ceil(max_model_len / block_size) + 1
    return _with_at_most(ledger, most_blocks * block_size * ledger.bytes_per_token)


def check_override(num_gpu_blocks: int, block_size: int, max_model_len: int) -> None:
    """Refuses a number of blocks, set by a person, in which one request of `max_model_len` tokens does not fit."""
    num_usable = num_gpu_blocks - 1
    if num_usable < math.ceil(max_model_len / block_size):
        longest = num_usable * block_size
        advice = f"set max_model_len to {longest} or less" if longest >= 2 else "no length does"
        raise MinivllmError(
            f"one request of max_model_len = {max_model_len} tokens does not fit into num_gpu_blocks_override = "
            f"{num_gpu_blocks} blocks of {block_size}, of which block 0 is the null block: {advice}, "
            "or give more blocks"
        )


def check_kv_cache_dtype(kv_cache_dtype: str, device: torch.device) -> None:
    """Refuses fp8 where the device does not compute with it.

    Raises:
        MinivllmError: it does not; the message says what would work.
    """
    if STORED_AS.get(kv_cache_dtype) != torch.float8_e4m3fn:
        return
    if device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9):
        return
    raise MinivllmError(
        f"kv_cache_dtype {kv_cache_dtype!r} needs an NVIDIA GPU of compute capability 8.9 or above (Ada, Hopper, "
        f'Blackwell), and this engine runs on {device_name(device)}: "int8" takes as little room anywhere'
    )


def allocate_kv_caches(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_dtype: str = "auto",
) -> list[LayerCache]:
    """Zeroed keys and values of every layer, each [num_blocks, block_size, kv_heads, head_dim]; and int8's scales.

    Raises:
        MinivllmError: the device has not so much memory.
    """
    heads, stored_as = config.num_key_value_heads, STORED_AS.get(kv_cache_dtype, dtype)
    shapes = [((num_blocks, block_size, heads, config.head_dim), stored_as)] * 2
    if stored_as == torch.int8:
        shapes += [((num_blocks, heads, block_size), torch.float32)] * 2
    layers = range(config.num_hidden_layers)
    refuse_beyond_memory(
        sum(math.prod(shape) * kind.itemsize for shape, kind in shapes) * len(layers),
        device,
        f"a KV cache of {num_blocks} blocks of {block_size} tokens",
        "give it fewer, or leave num_gpu_blocks_override out",
    )
    return [LayerCache(*(_zeros(shape, device, kind) for shape, kind in shapes)) for _ in layers]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # NumPy's zeros are pages that the system hands over when they are first written; torch's are written at once.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _with_at_most(ledger: MemoryLedger, most_bytes: int) -> MemoryLedger:
    """The same ledger with a smaller cache, and what that leaves as a row of its own."""
    if ledger.kv_bytes <= most_bytes:
        return ledger
    spared = ledger.kv_bytes - most_bytes
    rows = [row for row in ledger.rows if row.name not in ("KV cache", "less than a block")]
    rows[-1:] = [LedgerRow("KV cache", most_bytes), LedgerRow("more than requests can fill", spared), rows[-1]]
    return replace(ledger, rows=tuple(rows), kv_bytes=most_bytes)


def _bytes_outside_torch(device: torch.device) -> int:
    """What the CUDA context, and other programs, hold of a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
