"""The engine's attention: write the step's keys and values into their slots, then attend through the block tables.

In vLLM v0.33.0: `vllm/model_executor/layers/attention/attention.py` (`unified_kv_cache_update`,
`unified_attention_with_output`), `vllm/v1/attention/backend.py` (`CommonAttentionMetadata`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from minivllm.kernels.reshape_and_cache import reshape_and_cache
from minivllm.kernels.unified_attention import unified_attention
from minivllm.models.attention import AttentionFunction


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where one step's tokens belong, the same for all layers; tensors on the device, int32 but for `slot_mapping`.

    - `query_start_loc` [requests + 1]: where each request's tokens begin in the step's flat row.
    - `seq_lens` [requests]: the tokens of each request, those of this step included.
    - `block_table` [requests, blocks]; `slot_mapping` [tokens], int64: where this step's keys and values go.
    - `max_seq_len`: the greatest of `seq_lens`, which the host knows without asking the device.
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
    """The engine's attention over the caches of all layers. It knows of no step: `of_step` gives it one."""

    def __init__(
        self,
        kv_caches: Sequence[LayerCache],
        scale: float,
        sliding_window: int | None = None,
        backend: str | None = None,
    ) -> None:
        """`backend` is `unified_attention`'s; what the kernel writes with always follows the device."""
        self.kv_caches = kv_caches
        self.backend = backend
        self.scale = scale
        self.sliding_window = sliding_window

    def of_step(self, metadata: AttentionMetadata) -> AttentionFunction:
        """What the decoder calls for attention in a step with these tables."""
        return partial(self.attend, metadata)

    def attend(
        self, metadata: AttentionMetadata, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """As `AttentionFunction`, in the step of `metadata`: q attends to all keys so far, k and v included."""
        checked = layer_index > 0  # the tables are the same in all layers
        keys, values, key_scales, value_scales = self.kv_caches[layer_index]
        reshape_and_cache(
            k,
            v,
            keys,
            values,
            metadata.slot_mapping,
            key_scales=key_scales,
            value_scales=value_scales,
            checked=checked,
        )
        return unified_attention(
            q,
            keys,
            values,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.scale,
            k_scales=key_scales,
            v_scales=value_scales,
            sliding_window=self.sliding_window,
            max_seq_len=metadata.max_seq_len,
            backend=self.backend,
            checked=checked,
        )
