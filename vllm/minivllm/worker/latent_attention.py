"""The engine's attention over latents (MLA): it writes them to the cache, then attends in the form
that is cheaper for each request.

Requests with few new tokens (decodes, and drafts to verify) share one launch of the absorbed form
over the paged cache. Requests with many (prompts, and long chunks of them) take the plain form, one
request at a time: their latents, both cached and new, are gathered and expanded to keys and values.
Counting operations decides which form a request takes (`plain_form_is_cheaper`).

In vLLM v0.33.0: `vllm/model_executor/layers/attention/mla_attention.py`
(`MLAAttention.forward_impl`), which divides a step by the number of new tokens alone, and expands
long contexts in pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.kernels.mla_attention import concat_and_cache_mla, mla_attention
from minivllm.models.attention import attention_scale
from minivllm.models.latent_attention import (
    LatentAttentionFunction,
    UpProjection,
    plain_attention,
    plain_form_is_cheaper,
)
from minivllm.worker.paged_attention import AttentionMetadata


class LatentCache(NamedTuple):
    """One layer's latents, each with its rotated key, [blocks, block_size, kv_lora_rank +
    qk_rope_head_dim].
    """

    latents: Tensor


class PlainRequest(NamedTuple):
    """A request in the plain form: the slice of its new tokens in the flat batch, its blocks [n],
    and its length.
    """

    tokens: slice
    block_ids: Tensor
    seq_len: int


@dataclass(frozen=True, slots=True)
class StepForms:
    """A step's requests, divided by attention form; the division is the same for all layers.

    - `metadata`: of the whole step. `absorbed`: the tables of the requests in the absorbed form;
      None if there are none.
    - `absorbed_tokens` [n]: the indices of their tokens in the flat batch; None if they are all of
      it.
    - `plain`: the other requests.
    """

    metadata: AttentionMetadata
    absorbed: AttentionMetadata | None
    absorbed_tokens: Tensor | None
    plain: tuple[PlainRequest, ...]

    @classmethod
    def of(cls, metadata: AttentionMetadata, config: ModelConfig, block_size: int) -> "StepForms":
        """Divide a step's requests by form. A step of decodes alone needs no check: all of it is
        absorbed, and it may be captured in a CUDA graph.
        """
        if metadata.max_query_len == 1:
            return cls(metadata, metadata, None, ())
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        plain, others = [], []
        for row, (count, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
            if plain_form_is_cheaper(count, seq_len, config):
                block_ids = metadata.block_table[row, : -(-seq_len // block_size)]  # without the padding
                plain.append(PlainRequest(slice(starts[row], starts[row + 1]), block_ids, seq_len))
            else:
                others.append(row)
        if not plain:
            return cls(metadata, metadata, None, ())
        if not others:
            return cls(metadata, None, None, tuple(plain))
        device = metadata.seq_lens.device
        # Of the absorbed requests, in the flat batch.
        tokens = [token for row in others for token in range(starts[row], starts[row + 1])]
        absorbed = replace(
            metadata,
            query_start_loc=torch.tensor([0, *accumulate(counts[row] for row in others)], dtype=torch.int32).to(device),
            seq_lens=metadata.seq_lens[others],
            block_table=metadata.block_table[others],
        )
        return cls(metadata, absorbed, torch.tensor(tokens, device=device), tuple(plain))


class PagedLatentAttention:
    """The engine's attention over the latents of all layers. It keeps no per-step state:
    `of_step` binds a step.
    """

    def __init__(self, kv_caches: Sequence[LatentCache], config: ModelConfig, backend: str | None = None) -> None:
        """Bind attention to these caches and this model's config; `backend` is passed to
        `mla_attention`.
        """
        assert config.kv_lora_rank is not None
        self.kv_caches = kv_caches
        self.config = config
        self.backend = backend
        self.scale = attention_scale(config)
        self.rank = config.kv_lora_rank

    def of_step(self, metadata: AttentionMetadata) -> LatentAttentionFunction:
        """Return the attention function for a step with these tables, for the decoder to call."""
        return partial(self.attend, StepForms.of(metadata, self.config, self.kv_caches[0].latents.shape[1]))

    def attend(
        self,
        step: StepForms,
        layer_index: int,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        up: UpProjection,
    ) -> Tensor:
        """Implement `LatentAttentionFunction` for this step: attend to all latents so far,
        including those of the step.
        """
        cache = self.kv_caches[layer_index].latents
        concat_and_cache_mla(latent, k_rope, cache, step.metadata.slot_mapping)
        if step.absorbed is not None and step.absorbed_tokens is None:  # all of the step, without copies
            return self._absorbed(step.absorbed, layer_index, q_nope, q_rope, up)
        out = q_nope.new_empty(*q_nope.shape[:2], up.value_dim)
        if step.absorbed is not None:
            tokens = step.absorbed_tokens
            out[tokens] = self._absorbed(step.absorbed, layer_index, q_nope[tokens], q_rope[tokens], up)
        for tokens, block_ids, seq_len in step.plain:
            rows = cache[block_ids].flatten(0, 1)[:seq_len]  # [keys, width], including this step's
            latents, rotated = rows.split((self.rank, rows.shape[1] - self.rank), dim=1)
            out[tokens] = plain_attention(q_nope[tokens], q_rope[tokens], latents, rotated, up, self.scale)
        return out

    def _absorbed(
        self, metadata: AttentionMetadata, layer_index: int, q_nope: Tensor, q_rope: Tensor, up: UpProjection
    ) -> Tensor:
        attended = mla_attention(
            torch.cat((up.absorb(q_nope), q_rope), dim=-1),  # [tokens, heads, width]
            self.kv_caches[layer_index].latents,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            self.scale,
            kv_lora_rank=self.rank,
            max_seq_len=metadata.max_seq_len,
            backend=self.backend,
        )
        return up.expand_values(attended)
