"""The choice of a model's attention: over per-head keys and values, or over latents (MLA).

In vLLM v0.33.0: `vllm/v1/attention/selector.py` (`get_attn_backend`, with its `use_mla`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.models.attention import attention_scale
from minivllm.models.forward_context import Attention
from minivllm.models.latent_attention import UpProjection
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import PagedAttention


def make_attention(
    config: ModelConfig,
    kv_caches: Sequence[Any],
    *,
    backend: str | None = None,
    attention: Callable[..., PagedAttention] | None = None,
) -> PagedAttention | PagedLatentAttention:
    """Return a model's attention over the caches that `allocate_kv_caches` made.

    `backend` means the same as for `PagedAttention`; `attention` is a factory to call in place of
    `PagedAttention`.

    Raises:
        MinivllmError: the model keeps latents, for which there is only one implementation.
    """
    if config.kv_lora_rank is None:
        scale, window = attention_scale(config), config.sliding_window
        return attention(kv_caches, scale, window) if attention else PagedAttention(kv_caches, scale, window, backend)
    if attention is not None or backend == "naive":
        raise MinivllmError(
            "a model with latent attention (MLA) supports neither Parts(attention=...) nor attention_backend 'naive': "
            "leave it out"
        )
    return PagedLatentAttention(kv_caches, config, backend)


def without_attention(config: ModelConfig, max_model_len: int) -> Attention:
    """Return a stand-in for attention in steps that only measure memory; it allocates what
    attention would.

    That is little, except for latents in the plain form, which expands the keys and values of one
    request at a time.
    """
    if config.kv_lora_rank is None:
        return lambda layer, q, k, v: torch.zeros_like(q)

    def expand(layer: int, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, up: UpProjection) -> Tensor:
        up.expand(latent.new_empty(max_model_len, up.rank))  # the keys and values of one long request
        return q_nope.new_zeros(*q_nope.shape[:2], up.value_dim)

    return expand
