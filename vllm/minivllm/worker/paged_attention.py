"""The engine's attention: it writes the step's keys and values into their slots, then attends
through the block tables.

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
from minivllm.platforms.device import on_device
from minivllm.worker.input_batch import TokenSpans


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's attention tables, shared by all layers; tensors on the device, int32 except for
    `slot_mapping`.

    - `query_start_loc` [requests + 1]: where each request's tokens start in the flat batch.
    - `seq_lens` [requests]: the length of each request, including this step's tokens.
    - `block_table` [requests, blocks]; `slot_mapping` [tokens], int64: where this step's keys and
      values go.
    - `max_seq_len`, `max_query_len`: the maximum, over requests, of the length and of the tokens
      computed in this step; known on the host, to avoid a device sync.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_seq_len: int
    max_query_len: int

    @classmethod
    def of(cls, spans: TokenSpans, device: torch.device) -> "AttentionMetadata":
        """Copy the tables of a forward pass over these tokens to the device."""
        tables = (spans.query_start_loc, spans.seq_lens, spans.block_table, spans.slot_mapping)
        counts = spans.query_start_loc[1:] - spans.query_start_loc[:-1]  # tokens of each request
        most = int(spans.seq_lens.max()), int(counts.max())  # read on the host, before the copies
        return cls(*(on_device(table, device) for table in tables), *most)


class LayerCache(NamedTuple):
    """One layer's keys and values, each [blocks, block_size, kv_heads, head_dim], and their scales
    if they are int8.

    The scales are float32 [blocks, kv_heads, block_size]. Code that copies blocks must copy all
    tensors present.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


@dataclass(eq=False)
class PagedAttention:
    """The engine's attention over the caches of all layers. It keeps no per-step state: `of_step`
    binds a step.

    `backend` is passed to `unified_attention`; the kernel that writes the cache is always chosen by
    the device.
    """

    kv_caches: Sequence[LayerCache]
    scale: float
    sliding_window: int | None = None
    backend: str | None = None

    def of_step(self, metadata: AttentionMetadata) -> AttentionFunction:
        """Return the attention function for a step with these tables, for the decoder to call."""
        return partial(self.attend, metadata)

    def attend(
        self, metadata: AttentionMetadata, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Implement `AttentionFunction` for the step of `metadata`: q attends to all keys so
        far, including k.
        """
        checked = layer_index > 0  # all layers share the tables, so the first checks them for all
        keys, values, key_scales, value_scales = self.kv_caches[layer_index]
        reshape_and_cache(
            k, v, keys, values, metadata.slot_mapping, key_scales=key_scales, value_scales=value_scales, checked=checked
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
            max_query_len=metadata.max_query_len,
            backend=self.backend,
            checked=checked,
        )
