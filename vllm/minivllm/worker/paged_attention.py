"""The engine's attention: write the step's keys and values into their slots, then attend through the block tables.

In vLLM v0.33.0: `vllm/model_executor/layers/attention/attention.py` (`unified_kv_cache_update`,
`unified_attention_with_output`), `vllm/v1/attention/backend.py` (`CommonAttentionMetadata`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.kernels.unified_attention import unified_attention


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


class LayerCache(NamedTuple):
    """One layer's keys and values [blocks, block_size, kv_heads, head_dim]; of int8 ones also the scales.

    The scales are float32 [blocks, kv_heads, block_size]. What moves blocks moves all tensors that are there.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class PagedAttention:
    """What the decoder calls for attention: owns every layer's cache, and reads the step at hand from `metadata`."""

    def __init__(
        self,
        kv_caches: list[LayerCache],
        scale: float,
        sliding_window: int | None = None,
        backend: str | None = None,
    ) -> None:
        """`backend` is `unified_attention`'s; what the kernel writes with always follows the device."""
        self.kv_caches = kv_caches
        self.backend = backend
        self.scale = scale
        self.sliding_window = sliding_window
        self.metadata: AttentionMetadata | None = None

    def __call__(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `minivllm.models.attention.AttentionFunction`: q attends to all keys so far, k and v included."""
        assert self.metadata is not None
        step, checked = self.metadata, layer_index > 0
        keys, values, key_scales, value_scales = self.kv_caches[layer_index]
        reshape_and_cache(
            k,
            v,
            keys,
            values,
            step.slot_mapping,
            key_scales=key_scales,
            value_scales=value_scales,
            checked=checked,
        )
        return unified_attention(
            q,
            keys,
            values,
            step.query_start_loc,
            step.seq_lens,
            step.block_table,
            self.scale,
            k_scales=key_scales,
            v_scales=value_scales,
            sliding_window=self.sliding_window,
            max_seq_len=step.max_seq_len,
            backend=self.backend,
            checked=checked,
        )
