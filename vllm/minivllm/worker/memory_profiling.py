"""One-time memory profiling: what the weights and the largest step need, and how many cache blocks
fit in the rest.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker.determine_available_memory`).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory import Device, LedgerRow, MemoryLedger, memory_ledger
from minivllm.models.decoder import Decoder
from minivllm.platforms.device_memory import available_memory
from minivllm.sampling_params import SamplingParams
from minivllm.worker.attention import without_attention
from minivllm.worker.sample.sampler import sample
from minivllm.worker.sample.states import SamplingStates
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.speculator import Speculator

# Available memory that a CPU engine assumes if the system does not report it.
UNKNOWN_MEMORY = 4 * GIB


@dataclass(frozen=True)
class MemoryUse:
    """One rank's memory, in bytes: the device's total, and everything that uses it except the KV
    cache; `dtype` is the compute dtype.

    - `activation_peak`: what the largest step needs besides the weights, None if it could not be
      measured.
    - `cuda_graphs`: whether graphs will be captured; their size is not yet known.
    - `drafter`: the config of a model that drafts on this rank; `drafter_bytes`: its bytes.
      `lora_bytes`: those of the LoRA slots.
    - `ranks_in_host_memory`: how many ranks share a CPU's memory equally; 0 on a GPU.
    """

    device_name: str
    device_memory: int
    outside_torch: int
    weights: int
    activation_peak: int | None
    dtype: str
    cuda_graphs: bool
    drafter: ModelConfig | None = None
    drafter_bytes: int = 0
    lora_bytes: int = 0
    ranks_in_host_memory: int = 0


def device_memory(device: torch.device, ranks: int) -> tuple[str, int]:
    """Return the name and the size in bytes of a rank's memory: a GPU's, or an equal share of the
    host's.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    name = "CPU (available memory)"
    share = f"{name}, one of {ranks} ranks' share" if ranks > 1 else name
    return share, (available_memory() or UNKNOWN_MEMORY) // ranks


def activation_peak(model: Decoder, speculator: Speculator, settings: WorkerSettings) -> int | None:
    """Measure the bytes that the largest step needs beyond weights and cache; return None on a CPU."""
    device = model.embed_tokens.weight.device
    if device.type != "cuda":
        return None
    most_tokens = settings.max_num_batched_tokens
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    # The largest step, with the cache's memory still free.
    dummy_run(model, most_tokens, min(settings.max_num_seqs, most_tokens), settings.max_model_len)
    speculator.dummy_step(most_tokens)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def dummy_run(model: Decoder, num_tokens: int, num_rows: int, max_model_len: int) -> None:
    """Run the largest possible step, without attention; sampling applies top-p and min-p, but no
    bias or penalties.
    """
    weight = model.embed_tokens.weight
    stage = model.group.stage
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=weight.device)
    # [2, tokens, hidden], as from the stage before.
    received = None if stage.is_first else weight.new_zeros(2, num_tokens, model.config.hidden_size)
    hidden = model(ids, ids, without_attention(model.config, max_model_len), None, received)
    if not stage.is_last:
        return
    logits = model.compute_logits(hidden[:num_rows]).float()
    # Top-p and min-p need the most memory: they sort the logits.
    states = SamplingStates(num_rows)
    for row in range(num_rows):
        states.add_request(row, SamplingParams(top_p=0.9, min_p=0.01))
    none = np.zeros((num_rows, 0), np.int32)
    sample(logits, states.metadata(np.arange(num_rows), none, np.zeros(num_rows, int), np.zeros(num_rows, int)))


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
    host_tier: int = 0,
) -> MemoryLedger:
    """Budget the memory of one of `tp` ranks; `config` describes the whole model.

    `host_tier`: bytes of a second cache tier, for all ranks together. On a CPU it takes up the
    same memory.

    Activations are estimated if `use.activation_peak` is None. The pool never gets more blocks than
    `max_num_seqs` requests of `max_model_len` tokens could fill: on a CPU, spare memory is left to
    other programs.

    Raises:
        MinivllmError: one request of `max_model_len` tokens does not fit; the message names the
            longest that would.
    """
    ledger = memory_ledger(
        _without_window(config),
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
        drafter=use.drafter and _without_window(use.drafter),
        drafter_bytes=use.drafter_bytes,
        host_tier=host_tier // use.ranks_in_host_memory if use.ranks_in_host_memory else 0,
        lora_bytes=use.lora_bytes,
    )
    most_blocks = max_num_seqs * math.ceil(max_model_len / block_size) + 1  # and the null block
    return _with_at_most(ledger, most_blocks * ledger.kv.block_bytes)


def _without_window(config: ModelConfig) -> ModelConfig:
    """Return the config as the cache sees it: every token is kept, even outside a layer's
    sliding window.
    """
    return replace(config, sliding_window=None, layer_types=None)


def check_override(num_gpu_blocks: int, block_size: int, max_model_len: int) -> None:
    """Reject a user-set number of blocks that cannot hold one request of `max_model_len` tokens."""
    num_usable = num_gpu_blocks - 1
    if num_usable < math.ceil(max_model_len / block_size):
        longest = num_usable * block_size
        advice = f"set max_model_len to {longest} or less, or " if longest >= 2 else ""
        raise MinivllmError(
            f"one request of max_model_len = {max_model_len} tokens does not fit into num_gpu_blocks_override = "
            f"{num_gpu_blocks} blocks of {block_size}, of which block 0 is the null block: {advice}"
            "give more blocks"
        )


def _with_at_most(ledger: MemoryLedger, most_bytes: int) -> MemoryLedger:
    """Return the ledger with the cache capped at `most_bytes`, and a row for the memory that this
    frees.
    """
    if ledger.kv_bytes <= most_bytes:
        return ledger
    spared = ledger.kv_bytes - most_bytes  # left to other programs
    rows = [row for row in ledger.rows if row.name not in ("KV cache", "less than a block")]
    # The last row, what is not ours, stays last.
    rows[-1:] = [LedgerRow("KV cache", most_bytes), LedgerRow("more than requests can fill", spared), rows[-1]]
    return replace(ledger, rows=tuple(rows), kv_bytes=most_bytes)


def bytes_outside_torch(device: torch.device) -> int:
    """Return the GPU memory held by the CUDA context and by other programs."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
