"""The settings of a rank's worker and its model runner, sent to every rank once.

In vLLM v0.33.0: `vllm/config/vllm.py` (`VllmConfig`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig
from minivllm.platforms.threads import has_numba
from minivllm.platforms.triton_utils import INTERPRETED


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Settings sent to every rank, as in `EngineArgs`; `num_threads` is the total over all
    ranks.
    """

    model: str | Path
    device: str
    dtype: str
    load_format: str
    seed: int
    kv_cache_dtype: str
    quantization: str | None
    attention_backend: str | None
    attention: Callable[..., Any] | None
    draft_proposer: Callable[..., Any] | None
    rejection_sample: Callable[..., Any]
    use_kv_cache: bool
    speculative_config: SpeculativeConfig | None
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_threads: int
    enforce_eager: bool
    async_scheduling: bool = False
    kv_transfer_config: KVTransferConfig | None = None
    kv_connector: Callable[..., Any] | None = None
    lora_config: LoRAConfig | None = None
    lora_slots: Callable[..., Any] | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Return how many steps are to be in flight."""
        return self.pipeline_parallel_size if self.pipeline_parallel_size > 1 else 1 + self.async_scheduling

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_speculative_tokens(self) -> int:
        """Return the most drafts of a request in a step; 0 without speculation."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def uses_graphs(self) -> bool:
        """Return whether decode steps are captured: with the engine's own kernels, a KV cache and
        one stage; on a CPU with one rank and without adapters.

        They are not for a drafter that reads hidden states, which a graph does not hand out.
        """
        reads_hidden = self.speculative_config is not None and self.speculative_config.use_eagle
        fits = self.pipeline_parallel_size == 1 and self.uses_unified_attention and not reads_hidden
        if not fits or self.enforce_eager:
            return False
        if self.device == "cpu":
            return self.world_size == 1 and self.lora_config is None and has_numba()
        return not INTERPRETED

    @property
    def uses_unified_attention(self) -> bool:
        """Return whether attention is the engine's own kernel, over a KV cache."""
        return self.attention_backend is None and self.attention is None and self.use_kv_cache
