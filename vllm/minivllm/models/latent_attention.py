"""Multi-head latent attention (MLA): the keys and values of all heads come from one short vector
per token.

    latent = norm(down(x)) [kv_lora_rank]     key of head h = (up_k[h] latent, rotated part)     value = up_v[h] latent

Only the latent and the key's rotated part are cached. The latter, `qk_rope_head_dim` numbers, is
shared by all heads and not computed from the latent, since a position cannot be folded into the
up-projections. So a token leaves kv_lora_rank + qk_rope_head_dim numbers in a layer's cache,
however many heads there are.

The same attention has two forms, which differ only in the order of the matmuls:

    plain       expand the latents to keys and values of every head, then attend as usual
    absorbed    q · (up_k latent) = (q up_k) · latent: bring the queries into the latent space, attend there with one
                "head" for all, whose keys are (latent, rotated part) and whose values are the
                latents, and expand what comes out

For n new tokens that see m keys, with r = kv_lora_rank, and dims d (not rotated), e (rotated) and v
(value), a head multiplies and adds

    plain       m r (d + v) + pairs (d + e + v)             pairs: (query, key) pairs that are seen, n (m - (n - 1) / 2)
    absorbed    n r (d + v) + pairs (2 r + e)

A decode (n = 1) would expand every key for one query in the plain form; a prompt (n = m) pays for
the longer vectors of the absorbed form in every pair and saves nothing. `plain_form_is_cheaper`
counts; the head count cancels. Timed on one busy core, with 512 keys and 1 to 512 new tokens of two
shapes, the form that it chose was the faster one in 10 of 11 cases; for 16 tokens of
`tiny-python-mla` the absorbed form took 0.60 ms, and the plain one, which it chose, 0.78.

DeepSeek-V2, arXiv 2405.04434, section 2.1. In vLLM v0.33.0: `vllm/model_executor/layers/mla.py`
(`MultiHeadLatentAttentionWrapper`), `vllm/model_executor/layers/attention/mla_attention.py`
(`MLAAttention`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.errors import UnsupportedModelError
from minivllm.kernels.elementwise import rotate_heads
from minivllm.models.attention import CausalAttention
from minivllm.models.forward_context import Attention, ForwardContext
from minivllm.models.linear import UNQUANTIZED, Linear, LoadableLinearMethod, parameter
from minivllm.models.norm import RMSNorm
from minivllm.models.parallel import GroupCoordinator

# The norms inside attention ignore the config's `rms_norm_eps`, as in `transformers`.
INNER_EPS = 1e-6


class UpProjection(nn.Module):
    """The projection of the latent to each head's values, and to the unrotated part of each head's
    key.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.kv_lora_rank is not None
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        self.weight = parameter(torch.empty(self.heads * (self.nope_dim + self.value_dim), self.rank))

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Expand latents `[n, rank]` to keys `[n, heads, nope_dim]` and values `[n, heads,
        value_dim]`.
        """
        # [n, heads, nope_dim + value_dim]
        both = F.linear(latents, self.weight).view(len(latents), self.heads, -1)
        keys, values = both.split((self.nope_dim, self.value_dim), dim=-1)
        return keys, values

    def absorb(self, q_nope: Tensor) -> Tensor:
        """Project queries `[n, heads, nope_dim]` into the latent space: `[n, heads, rank]`."""
        # A matrix product for each head: (q up_k) · latent equals q · (up_k latent).
        return torch.bmm(q_nope.transpose(0, 1), self._by_head[:, : self.nope_dim]).transpose(0, 1)

    def expand_values(self, attended: Tensor) -> Tensor:
        """Expand weighted sums of latents `[n, heads, rank]` to weighted sums of values `[n, heads,
        value_dim]`.
        """
        return torch.bmm(attended.transpose(0, 1), self._by_head[:, self.nope_dim :].transpose(1, 2)).transpose(0, 1)

    @property
    def _by_head(self) -> Tensor:
        return self.weight.view(self.heads, -1, self.rank)


class LatentAttentionFunction(Protocol):
    """Attention of one layer over the flattened tokens of a step, from latents: the
    `AttentionFunction` of models with MLA.
    """

    def __call__(
        self, layer_index: int, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, up: UpProjection
    ) -> Tensor:
        """Attend from each token to the latents that it may see.

        Args:
            layer_index: index of the calling layer, from 0.
            q_nope, q_rope: `[tokens, heads, nope_dim]` and `[tokens, heads, rope_dim]`, the latter
                already rotated.
            latent, k_rope: `[tokens, rank]` and `[tokens, rope_dim]`, of the same tokens: what
                the cache stores of them.
            up: this layer's up-projection.

        Returns:
            `[tokens, heads, value_dim]`.
        """
        ...


class LatentAttention(nn.Module):
    """Latent attention with its projections. Projections of the same input are merged, in an order
    in which nothing is copied.

    The first matmul gives the unrotated parts of the queries, all rotated parts (the queries', then
    the key's) and the latent. With a `q_lora_rank`, the queries come from a latent of their own, in
    a second matmul.
    """

    def __init__(self, config: ModelConfig, index: int, group: GroupCoordinator, method: LoadableLinearMethod):
        super().__init__()
        if method is not UNQUANTIZED:
            raise UnsupportedModelError(
                "the weights of latent attention (MLA) cannot be quantized here: leave quantization out, or use the "
                "unquantized checkpoint"
            )
        assert config.kv_lora_rank is not None
        self.index = index
        self.group = group
        self.heads = config.num_attention_heads
        self.rank = config.kv_lora_rank
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.rotary_dim
        self.q_lora_rank = config.q_lora_rank
        queries = self.heads * (self.nope_dim + self.rope_dim)  # rows of the query projection
        first = (self.q_lora_rank or queries) + self.rope_dim + self.rank
        self.fused_qkv_a_proj = Linear(config.hidden_size, first)
        if self.q_lora_rank:
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, INNER_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, queries)
        self.kv_a_layernorm = RMSNorm(self.rank, INNER_EPS)
        self.kv_b_proj = UpProjection(config)
        self.o_proj = Linear(self.heads * config.v_head_dim, config.hidden_size, input_parts=group.size)

    def forward(
        self, hidden: Tensor, positions: Tensor, table: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        """Compute attention: `[tokens, hidden_size]` in, `[rows, hidden_size]` out."""
        # The merged rows' order lets every part be a view: [q_nope of all heads | q_rope of all, k_rope | latent].
        queries_and_key, latent = self.fused_qkv_a_proj(hidden).tensor_split((-self.rank,), dim=1)
        if self.q_lora_rank:
            # [tokens, q_lora_rank], [tokens, rope_dim]
            q_latent, k_rope = queries_and_key.split((self.q_lora_rank, self.rope_dim), dim=1)
            queries_and_key = torch.cat((self.q_b_proj(self.q_a_layernorm(q_latent)), k_rope), dim=1)
        q_nope, rotated = queries_and_key.tensor_split((self.heads * self.nope_dim,), dim=1)
        rotated = rotated.unflatten(1, (self.heads + 1, self.rope_dim))  # the last "head" is the key
        rotate_heads(rotated, positions, table)
        attended = context.attention(
            self.index,
            q_nope.unflatten(1, (self.heads, self.nope_dim)),
            rotated[:, : self.heads],
            self.kv_a_layernorm(latent),
            rotated[:, self.heads],
            self.kv_b_proj,
        ).flatten(1)
        return self.group.all_reduce(self.o_proj(attended if rows is None else attended[rows]))


def query_rows(config: ModelConfig) -> Tensor:
    """Return the order in which `LatentAttention` holds the rows of a checkpoint's query
    projection, as indices.

    A checkpoint stores head after head, each with its unrotated part before its rotated one, and
    rotates pairs of neighbours; `rotate_heads` pairs each element of one half with one of the other
    half.
    """
    nope = config.qk_nope_head_dim
    width = config.qk_nope_head_dim + config.rotary_dim
    # Each head's first row, [heads, 1]
    head = torch.arange(config.num_attention_heads, device="cpu")[:, None] * width
    rotated = nope + _halves(config.rotary_dim)
    return torch.cat(((head + torch.arange(nope, device="cpu")).flatten(), (head + rotated).flatten()))


def latent_rows(config: ModelConfig) -> Tensor:
    """Return the same kind of order for the projection to latent and rotated key; a checkpoint
    stores the latent first.
    """
    assert config.kv_lora_rank is not None
    return torch.cat(
        (config.kv_lora_rank + _halves(config.rotary_dim), torch.arange(config.kv_lora_rank, device="cpu"))
    )


def _halves(width: int) -> Tensor:
    """Return the even indices below `width`, then the odd ones."""
    return torch.arange(width, device="cpu").view(-1, 2).t().flatten()


# ---- the plain form ------------------------------------------------------------------------------


def plain_form_is_cheaper(num_new_tokens: int, seq_len: int, config: ModelConfig) -> bool:
    """Return whether the plain form needs fewer multiplications than the absorbed one; see the top
    of this file.
    """
    assert config.kv_lora_rank is not None
    expanded = config.qk_nope_head_dim + config.v_head_dim
    pairs = num_new_tokens * (2 * seq_len - num_new_tokens + 1) // 2  # (query, key) pairs that are seen
    # What the absorbed form costs extra in every pair, against expanding the cached keys once.
    saved = pairs * (2 * config.kv_lora_rank - expanded)
    return saved > (seq_len - num_new_tokens) * config.kv_lora_rank * expanded


def plain_attention(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_rope: Tensor, up: UpProjection, scale: float
) -> Tensor:
    """Attend within one sequence in the plain form; the queries are those of its last tokens.

    Args:
        q_nope, q_rope: `[queries, heads, nope_dim]` and `[queries, heads, rope_dim]`.
        latents, k_rope: `[keys, rank]` and `[keys, rope_dim]`, of all its tokens so far.
        up: the layer's up-projection.
        scale: the factor of q · k.

    Returns:
        `[queries, heads, value_dim]`.
    """
    k_nope, values = up.expand(latents)
    # [keys, heads, nope + rope]
    keys = torch.cat((k_nope, k_rope.unsqueeze(1).expand(-1, up.heads, -1)), dim=-1)
    queries = torch.cat((q_nope, q_rope), dim=-1)  # [queries, heads, nope + rope]
    context = len(keys) - len(queries)
    # [queries, keys]
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=keys.device).tril(context) if context else None
    by_head = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (queries, keys, values))
    out = F.scaled_dot_product_attention(*by_head, attn_mask=seen, is_causal=seen is None, scale=scale)
    return out[0].transpose(0, 1)


def causal_attention(config: ModelConfig, lengths: Sequence[int] | None = None) -> Attention:
    """Return attention without a cache for any model, over sequences of these `lengths`; None means
    one sequence of all tokens.
    """
    kind = CausalAttention if config.kv_lora_rank is None else CausalLatentAttention
    return kind(config, lengths)


class CausalLatentAttention(CausalAttention):
    """The plain form without a cache: everything that a token may see is in the same step."""

    def __call__(
        self, layer_index: int, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, up: UpProjection
    ) -> Tensor:
        """Implement `LatentAttentionFunction`; `layer_index` is ignored."""
        attend = partial(plain_attention, up=up, scale=self.scale)
        return self.by_sequence(attend, q_nope, q_rope, latent, k_rope)
