"""A Llama-style decoder-only transformer: Llama, Qwen2, Qwen3, Mistral and a dense DeepSeek-V2
differ only in details.

    for each layer:  h += attention(norm(h));  h += mlp(norm(h))          then  logits = head(norm(h))

The tokens of all sequences in a step form one flat batch, each with its position: the decoder does
not need to know where a sequence starts. Attention does; it is passed in with the step
(`ForwardContext`). Projections that read the same input are merged, as in vLLM: q, k and v are one
matmul, and so are the two halves of the gated MLP. How a matmul is computed is up to its
method (`minivllm.models.linear`). A rank of a tensor-parallel group has a share of the heads and of
the MLP's width, and adds its partial sums to those of the other ranks (`minivllm.models.parallel`).
A stage of a pipeline has some of the layers (`minivllm.models.pipeline`). DeepSeek-V2 has its own
attention (`minivllm.models.latent_attention`); its experts are not supported.

In vLLM v0.33.0: `vllm/model_executor/models/llama.py` (`LlamaForCausalLM`), `qwen2.py`, `qwen3.py`,
`deepseek_v2.py` (`DeepseekV2ForCausalLM`); `QKVParallelLinear` and `MergedColumnParallelLinear` in
`vllm/model_executor/layers/linear.py`.
"""

from itertools import islice

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.config.hf_config import ARCHITECTURES
from minivllm.errors import UnsupportedModelError
from minivllm.kernels.elementwise import rotate_heads
from minivllm.models.forward_context import Attention, ForwardContext
from minivllm.models.latent_attention import LatentAttention
from minivllm.models.linear import UNQUANTIZED, GatedLinear, Linear, LoadableLinearMethod
from minivllm.models.norm import RMSNorm
from minivllm.models.parallel import GroupCoordinator, shard_config
from minivllm.models.pipeline import get_pp_indices, stage_config
from minivllm.models.rotary import RotaryTable

FAMILIES = ("deepseek_v2", "llama", "mistral", "qwen2", "qwen3")


class Decoder(nn.Module):
    """The whole model, or one rank's part of it. Parameters are uninitialised:
    `minivllm.models.loader` fills them.

    `config` describes the part held here, `whole_config` the whole model.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: GroupCoordinator | None = None,
        method: LoadableLinearMethod = UNQUANTIZED,
    ):
        """Build the model with torch's default dtype and device.

        Args:
            config: of the whole model.
            group: the ranks that the model is divided over; None for no division.
            method: how the layers' projections are computed.

        Raises:
            UnsupportedModelError: this decoder does not support the model's family or variant.
            MinivllmError: the config lacks a field, or the model cannot be divided over that many
                ranks.
        """
        super().__init__()
        _check_supported(config)
        self.group = group = group or GroupCoordinator()
        self.whole_config = config
        stage = group.stage
        tied = config.tie_word_embeddings
        self.start_layer, self.end_layer = get_pp_indices(config.num_hidden_layers, stage.rank, stage.size)
        self.config = config = stage_config(shard_config(config, group.size), stage)
        # What another stage holds has no rows here, and its layers are empty modules, so that ours
        # keep their numbers.
        embeds = stage.is_first or (stage.is_last and tied)
        # A tied head reads the embedding, so the last stage holds it, too.
        rows = config.vocab_size if embeds else 0
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(rows, config.hidden_size))
        self.layers = nn.ModuleList(
            DecoderLayer(config, index - self.start_layer, group, method)
            if self.start_layer <= index < self.end_layer
            else nn.Identity()
            for index in range(self.whole_config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size if stage.is_last else 0, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size if stage.is_last else 0)
        if tied and stage.is_last:
            self.lm_head.weight = self.embed_tokens.weight  # pyright: ignore[reportAttributeAccessIssue]
        self.rotary = RotaryTable(config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext | Attention,
        rows: Tensor | None = None,
        intermediate: Tensor | None = None,
    ) -> Tensor:
        """Run one step over the flattened tokens of all sequences.

        Args:
            input_ids: `[tokens]`.
            positions: `[tokens]`, each token's position in its own sequence.
            context: the step's context. A bare attention function will do if nothing else is
                needed; it attends and maintains the cache, if any.
            rows: indices of the tokens whose output is needed; None for all. The others only
                contribute keys and values, so the last layer drops them after attention.
            intermediate: the output of the stage before; None on the first stage.

        Returns:
            `[rows, hidden_size]`, normalised, as `compute_logits` expects it. From a stage before
            the last: `[2, tokens, hidden_size]`, the last layer's output and the residual stream.
        """
        context = ForwardContext.of(context)
        if intermediate is None:
            hidden = self.embed_tokens(input_ids)
            residual = torch.empty_like(hidden).zero_()  # each norm adds what the layer before it has put out
        else:
            hidden, residual = intermediate
        table = self.rotary.table
        aux = context.aux_hidden_states
        last = len(self.layers) - 1
        for index, layer in enumerate(islice(self.layers, self.start_layer, self.end_layer), self.start_layer):
            if aux is not None and index in aux.layer_ids:
                aux.states.append(hidden + residual)
            # All tokens leave keys and values in every layer, but only `rows` need the last one's
            # output.
            hidden, residual = layer(hidden, residual, positions, table, context, rows if index == last else None)
        if not self.group.stage.is_last:
            return torch.stack((hidden, residual))  # what the next stage goes on with
        return self.norm(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the vocabulary: `[n, hidden_size]` to `[n, vocab_size]`."""
        return self.lm_head(hidden)


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, config: ModelConfig, index: int, group: GroupCoordinator, method: LoadableLinearMethod):
        super().__init__()
        attention = SelfAttention if config.kv_lora_rank is None else LatentAttention
        self.self_attn = attention(config, index, group, method)
        self.mlp = GatedMLP(config, group, method)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        positions: Tensor,
        table: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Map (output of the previous layer, residual stream before it) to the same pair for this
        layer.

        `[tokens, hidden_size]` in, `[rows, hidden_size]` out. Each residual add is fused with the
        norm that follows it.
        """
        hidden = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(hidden, positions, table, context, rows)
        # Attention has returned `rows` only; the residual stream must follow.
        residual = residual if rows is None else residual[rows]
        hidden = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class SelfAttention(nn.Module):
    """Attention with its projections: query, key and value projections, rotary positions,
    attention, and the output projection.
    """

    def __init__(self, config: ModelConfig, index: int, group: GroupCoordinator, method: LoadableLinearMethod):
        super().__init__()
        self.index = index
        self.group = group
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim  # q, k and v are one matrix product
        self.qkv_proj = Linear(config.hidden_size, width, config.attention_bias, method)
        inputs = self.heads * self.head_dim
        self.o_proj = Linear(inputs, config.hidden_size, config.attention_output_bias, method, group.size)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, hidden: Tensor, positions: Tensor, table: Tensor, context: ForwardContext, rows: Tensor | None
    ) -> Tensor:
        """Compute attention: `[tokens, hidden_size]` in, `[rows, hidden_size]` out."""
        # [tokens, q, k and v heads, head_dim]
        heads = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        parts = (self.heads, self.kv_heads, self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split_with_sizes(parts, dim=1)
            heads = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        rotate_heads(heads, positions, table, self.heads + self.kv_heads)  # values are not rotated
        q, k, v = heads.split_with_sizes(parts, dim=1)
        attended = context.attention(self.index, q, k, v).flatten(1)  # [tokens, heads × head_dim]
        # Each rank has one term of every output, from its own heads.
        return self.group.all_reduce(self.o_proj(attended if rows is None else attended[rows]))


class GatedMLP(nn.Module):
    """The gated MLP: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig, group: GroupCoordinator, method: LoadableLinearMethod):
        super().__init__()
        self.group = group
        width = config.intermediate_size
        # Gate and up are one matrix product.
        self.gate_up_proj = GatedLinear(config.hidden_size, 2 * width, config.mlp_bias, method)
        self.down_proj = Linear(width, config.hidden_size, config.mlp_bias, method, group.size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[tokens, hidden_size]` to the same shape."""
        return self.group.all_reduce(self.down_proj(self.gate_up_proj(hidden)))


def _check_supported(config: ModelConfig) -> None:
    """Raise unless this decoder computes exactly what the config describes."""
    config.require("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    reason = _unsupported(config)
    if reason:
        name = config.architecture or config.model_type or "this model"
        raise UnsupportedModelError(f"{name} {reason}")


def _unsupported(config: ModelConfig) -> str | None:
    """Return why this decoder cannot run the model, worded to follow the model's name in a
    sentence, or None if it can.
    """
    latent = config.kv_lora_rank is not None
    if config.model_type not in FAMILIES:
        return f"cannot be run; the decoder supports the families {', '.join(FAMILIES)}"
    if config.architecture not in ("", ARCHITECTURES[config.model_type]):
        computed = f"the decoder supports {ARCHITECTURES[config.model_type]}"
        return f"cannot be run, though its model_type is {config.model_type!r}: {computed}"
    if config.hidden_act != "silu":
        return f"has the activation {config.hidden_act!r}; the decoder supports only silu"
    if config.num_experts:
        first = f"has experts from layer {config.num_dense_layers} onward"
        return f"{first}, which the decoder does not support; use a model without experts"
    if latent != (config.model_type == "deepseek_v2"):
        return "has latent attention outside DeepSeek-V2's architecture, or lacks it there"
    if latent:
        config.require("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if config.attention_bias:
            return "has latent attention with biases, which the decoder does not support"
    if config.rotary_dim % 2:
        return f"rotates {config.rotary_dim} elements of a head; they are rotated in pairs, so the number must be even"
    if config.cache_exception:
        return f"cannot be run: {config.cache_exception}"
    if config.layer_types and len(set(config.layer_types)) > 1:
        return "has layers with and without a sliding window; the decoder supports only one kind in a model"
    return None
