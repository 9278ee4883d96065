"""A run of a real model with lesson 03's own attention: the error of its logits, and one row of
scores to inspect.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm_lab.flash_attention.other_attention import Kernel, stored_attention
from minivllm_lab.proof import furthest

KEYS_A_TILE = 4
"""Tile width of the displayed row."""


class ModelRun(NamedTuple):
    """Results of running a model with the given attention."""

    logits_off_by: float
    """The largest difference from the logits with `CausalAttention`."""
    largest_score: float
    row: dict
    """The last token's scores in one `layer` and `head`, rounded: `tokens` (their texts), `scores`,
    and `values`, the first three numbers of each value.
    """


@torch.inference_mode()
def attend_in_model(model: Decoder, tokenizer: Tokenizer, text: str, kernel: Kernel | None, large: float) -> ModelRun:
    """Run a model with `kernel` as its attention, and pick the row of scores that changes most
    visibly between tiles.

    If `kernel` is None, attention that stores its scores is used. Rows with a score above `large`
    are preferred.

    Raises:
        AssertionError: the logits are wrong.
    """
    encoded = tokenizer.encode(text)
    tokens, rows, values = torch.tensor(encoded.ids, device=model.embed_tokens.weight.device), [], []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        rows.extend(torch.einsum("hd,khd->hk", q[-1], k) / math.sqrt(q.shape[-1]))
        values.extend(v[:, :, :3].transpose(0, 1))
        return kernel(q, k, v)[0] if kernel else stored_attention(q, k, v)

    positions, plain = torch.arange(len(tokens), device=tokens.device), CausalAttention(model.config)
    logits, expected = (model.compute_logits(model(tokens, positions, way)) for way in (attend, plain))
    off = furthest(logits, expected)
    assert off < 1e-3, f"the model's logits are off by {off}"
    chosen = max(range(len(rows)), key=lambda index: (rows[index].max().item() > large, visible_steps(rows[index])))
    layer, head = divmod(chosen, model.config.num_attention_heads)
    row = {
        "layer": layer,
        "head": head,
        "tokens": [text[start:end] for start, end in encoded.offsets],
        "scores": [round(score, 4) for score in rows[chosen].tolist()],
        "values": [[round(x, 4) for x in value] for value in values[chosen].tolist()],
    }
    return ModelRun(off, max(scores.max().item() for scores in rows), row)


def visible_steps(scores: Tensor) -> int:
    """Count the tiles of this row [keys] that raise the maximum visibly, but do not wipe out the
    old sums.
    """
    running = scores.cummax(0).values[KEYS_A_TILE - 1 :: KEYS_A_TILE]
    kept = (running[:-1] - running[1:]).exp()
    return int(((kept > 0.05) & (kept < 0.9)).sum())
