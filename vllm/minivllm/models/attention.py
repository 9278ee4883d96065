"""The interface between decoder and attention, and its simplest implementation: causal attention
without a cache.

The decoder knows nothing about caches. It passes one layer's queries, keys and values to an
`AttentionFunction`, which stores the keys and values and reads back everything that each query may
see.

In vLLM the same interface is `Attention` in `vllm/model_executor/layers/attention/attention.py`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.models.rotary import sharpening


class AttentionFunction(Protocol):
    """Attention of one layer over the flattened tokens of a step."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from each token to the keys that it may see.

        Args:
            layer_index: index of the calling layer, from 0.
            q: `[tokens, heads, head_dim]`, rotary positions already applied, not yet scaled. The
                last dimension is contiguous; the others need not be.
            k, v: `[tokens, kv_heads, head_dim]`, of the same tokens; query head h uses key-value
                head `h // (heads // kv_heads)`.

        Returns:
            `[tokens, heads, head_dim]`.
        """
        ...


def attention_scale(config: ModelConfig) -> float:
    """Return the factor that q · k is multiplied by: one over the square root of a head's width.

    DeepSeek's YaRN sharpens attention here, not in the rotary table, since part of the head is not
    rotated.
    """
    if config.kv_lora_rank is None:
        return config.head_dim**-0.5
    scaling = config.rope_scaling or {}
    # The factor goes into q and k, so its square into their product.
    sharper = sharpening(scaling.get("factor") or 1.0, scaling.get("mscale_all_dim") or 0.0)
    return (config.qk_nope_head_dim + config.rotary_dim) ** -0.5 * sharper**2


class CausalAttention:
    """Attention without a cache: each token attends to itself and to the earlier tokens of its
    sequence, all of which are in the same step.
    """

    def __init__(self, config: ModelConfig, lengths: Sequence[int] | None = None):
        """Prepare for concatenated sequences.

        Args:
            config: the model's shape; its `sliding_window` applies.
            lengths: tokens of each sequence, in order; None for one sequence of all tokens.
        """
        self.scale = attention_scale(config)
        self.window = config.sliding_window
        self.lengths = None if lengths is None else list(lengths)

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Implement `AttentionFunction`; `layer_index` is ignored."""
        return self.by_sequence(self._sequence, q, k, v)

    def by_sequence(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call `attend` with each sequence's part of the tensors `[tokens, ...]`; return the
        concatenated results.
        """
        tokens = len(tensors[0])
        lengths = [tokens] if self.lengths is None else self.lengths
        if sum(lengths) != tokens:
            raise MinivllmError(f"the sequence lengths {lengths} do not add up to the {tokens} tokens given")
        parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
        return torch.cat([attend(*part) for part in parts])

    def _sequence(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [1, heads, tokens, head_dim], as torch takes them.
        heads = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
        mask = causal_mask(len(q), self.window, q.device) if self.window is not None else None
        out = F.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)  # [tokens, heads, head_dim]


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Return `[length, length]` booleans: whether the row's query may see the column's key.

    A window of w tokens includes the query's own.
    """
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]  # [length, length], negative in the future
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
