"""One-time memory profiling: what the weights and the largest step need, and how many cache blocks
fit in the rest.

In vLLM v0.33.0: `vllm/v1/worker/gpu_worker.py` (`Worker.determine_available_memory`).
"""

import math
from dataclasses import replace

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory import Device, LedgerRow, MemoryLedger, memory_ledger
from minivllm.models.decoder import Decoder
from minivllm.models.linear import weight_bytes
from minivllm.models.pipeline import stage_config
from minivllm.platforms.device_memory import available_memory
from minivllm.sampling_params import SamplingParams
from minivllm.worker.attention import without_attention
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.sample.sampler import sample
from minivllm.worker.sample.states import SamplingStates
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.speculator import Speculator

# Available memory that a CPU engine assumes if the system does not report it.
UNKNOWN_MEMORY = 4 * GIB


def activation_peak(model: Decoder, speculator: Speculator, settings: WorkerSettings) -> int:
    """Measure the bytes that the largest step needs beyond weights and cache, on a GPU."""
    device = model.embed_tokens.weight.device
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


def profile_memory(runner: ModelRunner, gpu_memory_utilization: float, host_tier: int) -> MemoryLedger:
    """Measure what this rank's weights and its largest step need, and budget its memory.

    `host_tier`: bytes of a second cache tier, for all ranks together. On a CPU it takes up the
    same memory. On a CPU, activations are estimated. The pool never gets more blocks than
    `max_num_seqs` requests of `max_model_len` tokens could fill: spare memory is left to other
    programs.

    Raises:
        MinivllmError: one request of `max_model_len` tokens does not fit; the message names the
            longest that would.
    """
    settings, device, group = runner.settings, runner.device, runner.model.group
    is_cuda = device.type == "cuda"
    drafter = runner.speculator.model_config
    dtype = str(runner.dtype).removeprefix("torch.")
    ledger = memory_ledger(
        _without_window(stage_config(runner.model.whole_config, group.stage)),
        _memory_of(device, group.world_size),
        max_model_len=settings.max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        tp=settings.tensor_parallel_size,
        kv_dtype=dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype,
        block_size=settings.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        weights=weight_bytes(runner.model),
        activation_peak=activation_peak(runner.model, runner.speculator, settings) if is_cuda else None,
        non_torch=bytes_outside_torch(device) if is_cuda else 0,
        # Their size is not known yet.
        cuda_graphs=None if settings.uses_graphs and is_cuda else 0,
        drafter=drafter and _without_window(drafter),
        drafter_bytes=runner.speculator.num_bytes(),
        host_tier=0 if is_cuda else host_tier // group.world_size,
        lora_bytes=runner.lora.slot_bytes,
    )
    # As many blocks as requests can fill, and the null block.
    most_blocks = settings.max_num_seqs * math.ceil(settings.max_model_len / settings.block_size) + 1
    return _with_at_most(ledger, most_blocks * ledger.kv.block_bytes)


def _memory_of(device: torch.device, ranks: int) -> Device:
    """Return a rank's memory: a GPU's, or an equal share of the host's."""
    if device.type == "cuda":
        return Device(torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    name = "CPU (available memory)"
    share = f"{name}, one of {ranks} ranks' share" if ranks > 1 else name
    return Device(share, (available_memory() or UNKNOWN_MEMORY) // ranks)


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
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
