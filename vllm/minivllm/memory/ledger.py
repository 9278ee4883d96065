"""The ledger of a device's memory: weights, working memory, and the KV cache with the tokens it
holds.

In vLLM v0.33.0: `vllm/v1/core/kv_cache_planning.py` (`get_kv_cache_configs`,
`check_enough_kv_cache_memory`, `estimate_max_model_len`) and `vllm/v1/worker/gpu_worker.py`
(`Worker.determine_available_memory`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.config import ModelConfig
from minivllm.config.checks import is_number, positive_count
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.memory.bytes_per_token import cache_dtype, kv_bytes_per_token, max_concurrency
from minivllm.memory.kv_layers import FullLayer, KVGroups

# Defaults for working memory that was not measured. The estimate of activations is within 6 % of
# the peaks in vLLM's start-up logs (tests/memory/startup_logs.toml); the other figures are typical
# of such logs. float32 copies, sorted values and 8-byte indices of [max_num_seqs, vocab] logits.
SAMPLER_BYTES_PER_LOGIT = 39
NON_TORCH_BYTES = GIB // 10
NON_TORCH_BYTES_TP = GIB  # with NCCL's buffers
CUDA_GRAPH_BYTES = GIB // 2
HOST_TIER = "KV cache, second tier in host memory"


@dataclass(frozen=True)
class Device:
    """A device with memory: a GPU, or a whole machine."""

    name: str
    # Memory visible to a program.
    memory_bytes: int


@dataclass(frozen=True)
class LedgerRow:
    """One use of device memory."""

    name: str
    bytes: int
    # True for an estimate, False if the figure was counted or measured.
    estimated: bool = False


@dataclass(frozen=True)
class MemoryLedger:
    """A GPU's memory, to the byte: one row for each use. The rows sum to the GPU's total."""

    device: Device
    rows: tuple[LedgerRow, ...]
    # Bytes left for the KV cache: vLLM's "Available KV cache memory".
    kv_bytes: int
    # The groups of layers that share the pool of blocks.
    kv: KVGroups
    max_model_len: int

    @property
    def bytes_per_token(self) -> int | None:
        """Return the bytes per token in the cache, or None if not every layer keeps every token."""
        return self.kv.bytes_per_token

    @property
    def block_size(self) -> int:
        """Return the number of tokens per block; that of the first group if groups differ."""
        return self.kv.groups[0].block_size

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool, including the null block."""
        return self.kv_bytes // self.kv.block_bytes

    @property
    def usable_blocks(self) -> int:
        """Return the number of blocks available to requests: all but block 0, the null block."""
        return max(0, self.num_blocks - 1)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all blocks: vLLM's "GPU KV cache size".

        If not every layer keeps every token, this is the number that vLLM prints: concurrency times
        `max_model_len`.
        """
        if self.bytes_per_token is None:
            return int(self.concurrency * self.max_model_len)
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Return how many requests of `max_model_len` tokens fit at once."""
        return self.concurrency_of(self.max_model_len)

    def concurrency_of(self, num_tokens: int) -> float:
        """Return how many requests of `num_tokens` tokens fit at once."""
        if self.bytes_per_token is None:
            return self.num_blocks / self.kv.blocks_per_request(num_tokens)
        return max_concurrency(self.tokens, num_tokens)

    @property
    def longest_request(self) -> int:
        """Return the longest request that the usable blocks hold, in tokens; capped at
        `max_model_len` if not every layer keeps every token.
        """
        if self.bytes_per_token is None:
            # Blocks grow with the length, so the longest that fits can be searched.
            lengths = range(1, self.max_model_len + 1)
            return bisect_right(lengths, self.usable_blocks, key=self.kv.blocks_per_request)
        return self.usable_blocks * self.block_size

    def check(self) -> None:
        """Raise if one request of `max_model_len` tokens does not fit.

        Raises:
            MinivllmError: it does not fit; the message says which length would fit.
        """
        if self.max_model_len <= self.longest_request:
            return
        # With the null block.
        needed = (self.kv.blocks_per_request(self.max_model_len) + 1) * self.kv.block_bytes
        advice = (
            f"set max_model_len to {self.longest_request} or less"
            if self.longest_request
            else "not even one block of tokens fits"
        )
        raise MinivllmError(
            f"one request of max_model_len = {self.max_model_len} tokens needs {needed / GIB:.2f} GiB of KV cache, and "
            f"{self.kv_bytes / GIB:.2f} GiB are left on the {self.device.name}: {advice}, or give the engine more "
            f"memory (a higher gpu_memory_utilization, a smaller KV dtype, more GPUs)"
        )


def memory_ledger(
    config: ModelConfig,
    device: Device,
    *,
    weights: int,
    max_model_len: int,
    gpu_memory_utilization: float = 0.92,
    tp: int = 1,
    kv_dtype: str = "auto",
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    activation_peak: int | None = None,
    non_torch: int | None = None,
    cuda_graphs: int | None = None,
    kv: KVGroups | None = None,
    drafter: ModelConfig | None = None,
    drafter_bytes: int = 0,
    host_tier: int = 0,
    lora_bytes: int = 0,
    check: bool = True,
) -> MemoryLedger:
    """Divide up the memory of one GPU like vLLM at start-up: whatever is left of the budget becomes
    KV cache.

    Args:
        config: the model's shape.
        device: the GPU, or a whole machine.
        weights: bytes of the weights, with the RoPE table.
        max_model_len: the longest request, prompt plus output.
        gpu_memory_utilization: the fraction of the device's memory that the engine may use.
        tp: GPUs that share one copy of the model; the ledger describes one of them.
        kv_dtype: see `kv_bytes_per_token`.
        block_size: tokens per KV-cache block.
        max_num_batched_tokens, max_num_seqs: the largest step, whose activations are estimated.
        activation_peak, non_torch, cuda_graphs: bytes, if known from a start-up log or a
            measurement; if not, they are estimated.
        kv: the groups of the model's layers; None: every layer keeps every token.
        drafter: a model that drafts tokens for this one, if any. All of it is on this GPU,
            whatever `tp` is, and so does its cache, which has the same blocks.
        drafter_bytes: its bytes without the cache.
        host_tier: bytes of a second tier of the cache, if it is in the same memory: on a CPU.
        lora_bytes: bytes of the adapters' slots.
        check: raise if a request of `max_model_len` does not fit; if False, return the ledger
            anyway.

    Raises:
        MinivllmError: nothing is left for the KV cache, a request of `max_model_len` does not fit
            (the message says which length would), or an argument is invalid.
    """
    if not is_number(gpu_memory_utilization) or not 0 < gpu_memory_utilization <= 1:
        raise MinivllmError(f"gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization!r}")
    if kv is None:
        page = kv_bytes_per_token(config, kv_dtype, tp) * positive_count("block_size", block_size)
        kv = KVGroups((FullLayer(block_size, page),), page)
    if drafter is not None:
        # The draft model's cache has the same blocks.
        kv = kv.widened(kv_bytes_per_token(drafter, cache_dtype(config, kv_dtype)))
    budget = int(device.memory_bytes * gpu_memory_utilization)  # what the engine may use of the device
    before_cache = (
        _row("weights and rotary table", weights),
        *((_row("draft model", drafter_bytes),) if drafter else ()),
        *((_row("LoRA slots", lora_bytes),) if lora_bytes else ()),
        _row(
            "activations", activation_peak, estimated_activation_peak(config, max_num_batched_tokens, max_num_seqs, tp)
        ),
        _row("outside torch", non_torch, NON_TORCH_BYTES if tp == 1 else NON_TORCH_BYTES_TP),
        _row("CUDA graphs", cuda_graphs, CUDA_GRAPH_BYTES),
        *((LedgerRow(HOST_TIER, host_tier),) if host_tier else ()),
    )
    # Whatever is left becomes the cache, in whole blocks.
    kv_bytes = budget - sum(row.bytes for row in before_cache)
    if kv_bytes < kv.block_bytes:
        raise _nothing_left(device, gpu_memory_utilization, before_cache)
    rows = (
        *before_cache,
        LedgerRow("KV cache", kv_bytes // kv.block_bytes * kv.block_bytes),
        LedgerRow("less than a block", kv_bytes % kv.block_bytes),
        LedgerRow("not ours to use", device.memory_bytes - budget),
    )
    ledger = MemoryLedger(device, rows, kv_bytes, kv, positive_count("max_model_len", max_model_len))
    if check:
        ledger.check()
    return ledger


def _nothing_left(device: Device, utilization: float, rows: Sequence[LedgerRow]) -> MinivllmError:
    used = ", ".join(f"{row.name} {row.bytes / GIB:.2f}" for row in rows)
    memory = device.memory_bytes
    return MinivllmError(
        f"nothing is left for the KV cache on the {device.name}: of {int(memory * utilization) / GIB:.2f} GiB "
        f"({utilization} of {memory / GIB:.2f}), these take: {used} GiB"
    )


def estimated_activation_peak(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> int:
    """Estimate the peak working memory of one step, in bytes: the MLP of a full prefill step, or
    the sampler.

    Widths that the config does not give count as 0.
    """
    mlp_width = -(-(config.intermediate_size or config.moe_intermediate_size) // tp)
    # Input, gate and up, and their product, in 16 bits.
    mlp = positive_count("max_num_batched_tokens", max_num_batched_tokens) * 3 * (config.hidden_size + mlp_width) * 2
    sampler = positive_count("max_num_seqs", max_num_seqs) * config.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return max(mlp, sampler)


def _row(name: str, measured: int | None, estimate: int = 0) -> LedgerRow:
    if measured is None:
        return LedgerRow(name, estimate, estimated=True)
    if not is_number(measured) or measured < 0:
        raise MinivllmError(f"{name}: {measured!r} must be a number of bytes, or None")
    return LedgerRow(name, int(measured))
