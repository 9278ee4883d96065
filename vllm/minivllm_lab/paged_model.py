"""A model whose keys and values are in blocks, for scripts that do their own scheduling, one
request at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model


@cache
def _decoder(model: str, device: str) -> Decoder:
    return load_model(model, torch.device(device), torch.float32)[0]


def decoder_of(arguments: argparse.Namespace) -> Decoder:
    """Return the model of a script's arguments in float32, loaded once."""
    return _decoder(arguments.model, str(arguments.device))


class PagedModel:
    """A model and its cache, [2 * layers, blocks, block_size, kv_heads, head_dim].

    Layer i has its keys in cache[2 * i], its values in cache[2 * i + 1].
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        config, weight = model.config, model.embed_tokens.weight
        shape = (2 * config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.model, self.num_blocks, self.block_size = model, num_blocks, block_size
        self.cache = weight.new_zeros(shape)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in the cache, over all layers."""
        return self.cache[:, 0, 0].numel() * self.cache.element_size()

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> Tensor:
        """Compute a request's tokens after its first `start`; return float32 logits [vocab] of the
        last one.

        `block_ids` is the request's block table, whose slots hold the keys and values of the first
        `start` tokens.
        """
        device, end = self.cache.device, start + len(token_ids)
        positions, table = torch.arange(start, end, device=device), torch.tensor(block_ids, device=device)
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        visible = torch.arange(end, device=device) <= positions[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            caches = self.cache[2 * layer : 2 * layer + 2]
            caches[0, blocks, offsets], caches[1, blocks, offsets] = k, v
            keys, values = caches[:, table].flatten(1, 2)[:, :end].transpose(1, 2)
            heads = (q.transpose(0, 1)[None], keys[None], values[None])
            return F.scaled_dot_product_attention(*heads, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)

        hidden = self.model(torch.tensor(token_ids, device=device), positions, attend)
        return self.model.compute_logits(hidden[-1:])[0].float()
