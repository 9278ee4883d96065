"""The engine's attention: write the step's keys and values into their slots, then attend through the block tables.

In vLLM v0.33.0: `vllm/model_executor/layers/attention/attention.py` (`unified_kv_cache_update`,
`unified_attention_with_output`), `vllm/v1/attention/backend.py` (`CommonAttentionMetadata`).
"""

from dataclasses import dataclass

import torch

from minivllm.kernels.attention import unified_attention
from minivllm.kernels.cache import reshape_and_cache


@dataclass(slots=True)
class AttentionMetadata:
    """Where one step's tokens belong, the same for all layers; int32 on the device, but for `slot_mapping` (int64).

    query_start_loc [requests + 1], seq_lens [requests], block_table [requests, blocks], slot_mapping [tokens];
    max_seq_len, the greatest of seq_lens, which the host knows without asking the device.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_seq_len: int


class PagedAttention:
    """What the decoder calls for attention: owns the cache of every layer, and reads the step at hand from `metadata`.

    `kv_caches`: for each layer, keys and values [blocks, block_size, kv_heads, head_dim].
    """

    def __init__(
        self, kv_caches: list[tuple[torch.Tensor, torch.Tensor]], scale: float, sliding_window: int | None = None
    ) -> None:
        self.kv_caches = kv_caches
        self.scale = scale
        self.sliding_window = sliding_window
        self.metadata: AttentionMetadata | None = None

    def __call__(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `minivllm.models.attention.AttentionFunction`: q attends to all keys so far, k and v included."""
        assert self.metadata is not None
        step = self.metadata
        k_cache, v_cache = self.kv_caches[layer_index]
        reshape_and_cache(k, v, k_cache, v_cache, step.slot_mapping)
        return unified_attention(
            q,
            k_cache,
            v_cache,
            step.query_start_loc,
            step.seq_lens,
            step.block_table,
            self.scale,
            sliding_window=self.sliding_window,
            max_seq_len=step.max_seq_len,
        )
