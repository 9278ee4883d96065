"""The EAGLE-3 head: one decoder layer that drafts from the target's own hidden states (arXiv
2503.01840).

A draft model has to work out from the tokens alone what the target already knows. The head need
not: it reads the target's hidden states from three depths, mixed into one vector by `fc`, beside
the embedding of the token that the target has just sampled, and predicts the token after that.

    h = fc(concat of three hidden states of token i)         computed by the target
    g = layer(concat(norm(embed(token i + 1)), norm(h)))     then token i + 2 is drafted from  lm_head(norm(g))
    g = layer(concat(norm(embed(token i + 2)), norm(g)))     and so on, from what the head itself has made

Its only layer has a KV cache of its own. Embeddings are the target's, and so is the LM head unless
the checkpoint has one.

In vLLM v0.33.0: `vllm/model_executor/models/llama_eagle3.py` (`Eagle3LlamaForCausalLM`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.config.checks import is_count
from minivllm.config.model_files import config_path, read_json_object
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.models.decoder import Decoder, GatedMLP, SelfAttention
from minivllm.models.forward_context import Attention, ForwardContext
from minivllm.models.linear import UNQUANTIZED, Linear
from minivllm.models.loader import default_dtype, fill_slots, slots_of, stored_tensors, weight_files
from minivllm.models.norm import RMSNorm
from minivllm.models.parallel import GroupCoordinator
from minivllm.models.rotary import RotaryTable

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_AUX_HIDDEN_STATES = 3
# With one of these settings, vLLM computes another head than this one.
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config", "parallel_drafting")


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    - `model`: its layer, as a model of one layer.
    - `aux_layer_ids`: where the target's hidden states come from, as in `AuxHiddenStates`.
    - `draft_vocab_size`: number of tokens that the head can draft; the target's vocabulary may be
      larger.
    """

    model: ModelConfig
    aux_layer_ids: tuple[int, ...]
    draft_vocab_size: int

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path, target: ModelConfig) -> "Eagle3Config":
        """Read the config of a head for this target, from a local directory or the Hugging Face
        Hub.

        Raises:
            UnsupportedModelError: not an EAGLE-3 head, or a variant that is not computed here.
            MinivllmError: there is no such model, a setting is invalid, or the head belongs to
                another target.
        """
        contents = read_json_object(config_path(path_or_name))
        try:
            return cls.from_dict(contents, target)
        except MinivllmError as error:
            raise type(error)(f"{path_or_name}: {error}") from error

    @classmethod
    def from_dict(cls, contents: Mapping[str, Any], target: ModelConfig) -> "Eagle3Config":
        """Read the config from the contents of a `config.json`; raise like `from_pretrained`."""
        model = ModelConfig.from_dict(contents)
        if model.architecture != ARCHITECTURE:
            name = model.architecture or "this model"
            raise UnsupportedModelError(f"{name} is not an EAGLE-3 head; the method eagle3 needs {ARCHITECTURE}")
        variant = next((name for name in VARIANTS if contents.get(name)), None)
        if variant or model.num_hidden_layers != 1:
            what = f"{variant}={contents[variant]!r}" if variant else f"{model.num_hidden_layers} layers"
            raise UnsupportedModelError(f"the head has {what}; use a head of one layer, without variants")
        model.require("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
        for name in ("hidden_size", "vocab_size"):
            if getattr(model, name) != getattr(target, name):
                values = f"{getattr(model, name)}, but the target's is {getattr(target, name)}"
                raise MinivllmError(f"the head's {name} is {values}: it was trained for another target")
        draft_vocab_size = contents.get("draft_vocab_size") or model.vocab_size
        if not is_count(draft_vocab_size, 1) or draft_vocab_size > model.vocab_size:
            limits = f"from 1 to {model.vocab_size}"
            raise MinivllmError(f"draft_vocab_size is {draft_vocab_size!r}; it must be a whole number {limits}")
        return cls(model, _aux_layer_ids(contents, target), draft_vocab_size)


def _aux_layer_ids(contents: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the configured layers, or by default one near the beginning, one in the middle and one
    near the end.
    """
    layers = target.num_hidden_layers
    ids = contents.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    valid = isinstance(ids, list) and all(is_count(index, 0) and index < layers for index in ids)
    if not valid or len(ids) != NUM_AUX_HIDDEN_STATES or sorted(set(ids)) != ids:
        raise MinivllmError(
            f"eagle_aux_hidden_state_layer_ids is {ids!r}; it must list {NUM_AUX_HIDDEN_STATES} different layers of "
            f"the target in ascending order, each from 0 to {layers - 1}"
        )
    return tuple(ids)


class Eagle3Head(nn.Module):
    """The head of one target, whose embeddings it shares. Parameters are uninitialised:
    `load_eagle3` fills them.
    """

    def __init__(self, config: Eagle3Config, target: Decoder, own_lm_head: bool):
        """Build the head with torch's default dtype and device; without `own_lm_head` it uses the
        target's LM head.
        """
        super().__init__()
        model = config.model
        self.eagle_config = config
        self.config = model
        self._target = (target,)  # in a tuple, so that its parameters are not also the head's
        self.fc = Linear(NUM_AUX_HIDDEN_STATES * model.hidden_size, model.hidden_size)
        self.midlayer = Eagle3Layer(model)
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.own_lm_head = Linear(model.hidden_size, config.draft_vocab_size) if own_lm_head else None
        self.rotary = RotaryTable(model)
        self.draft_id_to_target_id: Tensor | None
        self.register_buffer("draft_id_to_target_id", None, persistent=False)

    @property
    def embed_tokens(self) -> nn.Embedding:
        """Return the target's embedding."""
        return self._target[0].embed_tokens

    def combine_hidden_states(self, aux_hidden_states: Tensor) -> Tensor:
        """Mix the target's hidden states, `[tokens, 3 * hidden_size]`, into the one that the
        layer reads.
        """
        return self.fc(aux_hidden_states)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        context: ForwardContext | Attention,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one step over the flattened tokens of all sequences.

        Args:
            input_ids: `[tokens]`, the token *after* each hidden state.
            positions: `[tokens]`, the position of each hidden state in its sequence.
            hidden: `[tokens, hidden_size]`, from `combine_hidden_states`, or the second result of
                an earlier step.
            context: as for `Decoder.forward`; the layer's index is 0.
            rows: indices of the tokens to draft after; None for all. The others only contribute
                keys and values.

        Returns:
            `[rows, hidden_size]`: normalised, as `compute_logits` expects it, and before the norm,
            for the next step.
        """
        embeds = self.embed_tokens(input_ids)  # [tokens, hidden_size]
        table = self.rotary.table
        hidden, residual = self.midlayer(embeds, hidden, positions, table, ForwardContext.of(context), rows)
        return self.norm(hidden, residual), residual

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the target's vocabulary `[n, vocab_size]`; tokens that the head
        cannot draft get -inf.
        """
        logits = (self.own_lm_head or self._target[0].lm_head)(hidden)
        if self.draft_id_to_target_id is None:
            return logits
        # Not every token of the target can be drafted; the others have probability 0.
        whole = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        whole[:, self.draft_id_to_target_id] = logits
        return whole


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and hidden state side by side."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        group = GroupCoordinator()  # every rank of a group has the whole head
        self.self_attn = SelfAttention(config, 0, group, UNQUANTIZED)
        width = len(self.self_attn.qkv_proj.weight)
        # Its input is twice as wide as an ordinary layer's.
        self.self_attn.qkv_proj = Linear(2 * config.hidden_size, width, config.attention_bias)
        self.mlp = GatedMLP(config, group, UNQUANTIZED)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        positions: Tensor,
        table: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Map embeddings and hidden states `[tokens, hidden_size]` to the output and the residual
        stream of `rows`.

        `hidden` is not modified: the residual adds go into a copy.
        """
        # [tokens, 2 × hidden_size]
        x = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        attended = self.self_attn(x, positions, table, context, rows)
        # The norm below adds into its residual, and a caller may read `hidden` again.
        residual = hidden.clone() if rows is None else hidden[rows]
        return self.mlp(self.post_attention_layernorm(attended, residual)), residual


def load_eagle3(path_or_name: str | Path, target: Decoder) -> Eagle3Head:
    """Load a head for this target, in the target's dtype and on its device.

    Raises:
        UnsupportedModelError: not an EAGLE-3 head, or a variant that is not computed here.
        MinivllmError: the head is for another target, or a tensor is missing, unexpected or of
            another shape; the message names it.
    """
    config = Eagle3Config.from_pretrained(path_or_name, target.whole_config)
    tensors = dict(stored_tensors(weight_files(path_or_name)))
    # Which of the target's tokens can be drafted; d2t says the same the other way round.
    tensors.pop("t2d", None)
    own_lm_head = "lm_head.weight" in tensors
    _check_vocabulary(config, tensors, own_lm_head)
    weight = target.embed_tokens.weight
    with torch.device(weight.device), default_dtype(weight.dtype):
        head = Eagle3Head(config, target, own_lm_head).eval()
    d2t = tensors.pop("d2t", None)
    if d2t is not None:
        head.draft_id_to_target_id = _draft_ids(config, d2t).to(weight.device)
    # The head is never divided: one rank, which holds all of it.
    slots = slots_of(head, config.model, GroupCoordinator(), (0, 1))
    fill_slots({name.removeprefix("own_"): slot for name, slot in slots.items()}, tensors.items())
    return head


def _check_vocabulary(config: Eagle3Config, tensors: Mapping[str, Tensor], own_lm_head: bool) -> None:
    """Raise unless the checkpoint lists the tokens that it drafts if, and only if, they are not all
    of the target's.
    """
    drafted, whole = config.draft_vocab_size, config.model.vocab_size
    if drafted == whole and "d2t" in tensors:
        raise MinivllmError(
            f"the checkpoint has a tensor 'd2t', though draft_vocab_size is the target's vocab_size ({whole}): a head "
            "that can draft every token must not have one"
        )
    if drafted < whole and not ("d2t" in tensors and own_lm_head):
        lacking = "lm_head.weight" if "d2t" in tensors else "d2t"
        raise MinivllmError(f"the checkpoint lacks {lacking!r}, but this head drafts {drafted} of {whole} tokens")


def _draft_ids(config: Eagle3Config, d2t: Tensor) -> Tensor:
    """Return the target's id of each token that can be drafted; `d2t` [draft_vocab_size] holds its
    difference from the draft id.
    """
    if d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        raise MinivllmError(
            f"the tensor 'd2t' of the checkpoint is {d2t.dtype} of shape {tuple(d2t.shape)}; it must be one integer "
            f"for each of {config.draft_vocab_size} tokens"
        )
    ids = torch.arange(config.draft_vocab_size) + d2t.long()
    if ids.unique().numel() < len(ids) or ids.min() < 0 or ids.max() >= config.model.vocab_size:
        last = config.model.vocab_size - 1
        raise MinivllmError(f"the tensor 'd2t' of the checkpoint must map to different tokens from 0 to {last}")
    return ids
