"""A model with one request's KV cache, in contiguous slots as in lesson 01; it can forget its last
tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.decoder import Decoder


class CachedModel:
    """A model with a cache of `length` tokens. Set `length` lower to forget the last ones: the next
    tokens overwrite them.
    """

    def __init__(self, model: Decoder, max_model_len: int) -> None:
        config, weight = model.config, model.embed_tokens.weight
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, max_model_len, config.head_dim)
        self.model, self.cache, self.length, self.passes = model, weight.new_zeros(shape), 0, 0

    @torch.inference_mode()
    def forward(self, token_ids: list[int]) -> Tensor:
        """Run the tokens that follow the cached ones in one pass; return logits float32 [tokens,
        vocab].
        """
        start, end = self.length, self.length + len(token_ids)
        positions = torch.arange(start, end, device=self.cache.device)
        visible = torch.arange(end, device=self.cache.device) <= positions[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[layer]
            keys[:, start:end], values[:, start:end] = k.transpose(0, 1), v.transpose(0, 1)
            heads = (q.transpose(0, 1)[None], keys[None, :, :end], values[None, :, :end])
            return F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)

        hidden = self.model(torch.tensor(token_ids, device=self.cache.device), positions, attend)
        self.length, self.passes = end, self.passes + 1
        return self.model.compute_logits(hidden).float()
