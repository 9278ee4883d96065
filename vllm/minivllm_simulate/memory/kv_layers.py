"""The tokens that each kind of layer keeps for a request, and the groups in which layers share one
pool of blocks.

A model whose layers all keep every token has one group, and its cache grows by a fixed number of
bytes per token. Sliding-window layers keep only the last tokens, and linear-attention layers keep
one state. vLLM makes the pages of all kinds the same size, puts the same number of layers of one
kind into each group, and lets every group take blocks from the same pool, so the number of blocks
for a request of a given length can be computed, even though there is no fixed number of bytes per
token.

In vLLM v0.33.0: `vllm/v1/kv_cache_interface.py` (`FullAttentionSpec`, `SlidingWindowSpec`,
`MambaSpec`), `vllm/v1/core/kv_cache_planning.py` (`get_kv_cache_groups`,
`unify_kv_cache_spec_page_size`), and `vllm/platforms/interface.py` (`_align_hybrid_block_size`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minivllm.config import ModelConfig
from minivllm.config.cache_kinds import FULL, SLIDING
from minivllm.config.checks import positive_count
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.memory.bytes_per_token import Model, as_config, kv_bytes_per_token, layer_bytes_per_token, serving_dtype
from minivllm.memory.kv_layers import FullLayer, KVGroups
from minivllm_simulate.memory.layer_kinds import LINEAR, counted_layer_types
from minivllm_simulate.memory.parameters import bytes_of_dtype

STEPS_IN_FLIGHT = 2  # async scheduling: the blocks of two steps are held before the first one's are freed
GDN_CHECKPOINT_TOKENS = 64
GDN_FIELDS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
PADDED_BELOW = 1.5  # kinds whose layer counts differ by less form groups of the larger count


@dataclass(frozen=True)
class WindowLayer(FullLayer):
    """A layer that keeps the last `window` tokens, plus those of the steps in flight."""

    window: int

    def blocks(self, num_tokens: int, in_flight: int) -> int:
        # The window, and what may still be rejected.
        held = super().blocks(min(self.window - 1 + in_flight, num_tokens), in_flight)
        return held + 1  # the window may begin inside a block


@dataclass(frozen=True)
class StateLayer(FullLayer):
    """A layer with one state of fixed size: the running one, and copies for the prefix cache."""

    states: int

    def blocks(self, num_tokens: int, in_flight: int) -> int:
        return self.states


def kv_groups(
    model: Model, kv_dtype: str = "auto", tp: int = 1, block_size: int = 16, max_num_batched_tokens: int = 8192,
    steps_in_flight: int = STEPS_IN_FLIGHT, gdn_checkpoints: bool = False, states: int | None = None,
) -> KVGroups:  # fmt: skip
    """Return the groups of a model's layers on one of `tp` GPUs, as vLLM v0.33.0 forms them by
    default.

    Args:
        model: a ModelConfig or the contents of a `config.json`.
        kv_dtype, tp: see `kv_bytes_per_token`.
        block_size: tokens per block of the full-attention layers; states may require larger ones.
        max_num_batched_tokens: the largest step.
        steps_in_flight: 2 with async scheduling, the default; 1 without it, and in versions that
            did not count it.
        gdn_checkpoints: the GPU has FlashInfer's kernel for gated delta nets, which exports states
            inside a prefill.
        states: state blocks of a request; None: with prefix caching, the default. Without it: 1.

    Raises:
        UnsupportedModelError: what a layer of this model keeps is not known here.
        MinivllmError: unknown dtype, or `tp` does not fit the number of KV heads.
    """
    config = as_config(model)
    block_size = positive_count("block_size", block_size)
    # None: all layers are of the kind that keeps every token.
    kinds = None if config.keeps_every_token else counted_layer_types(config)
    if kinds is None:
        page = kv_bytes_per_token(config, kv_dtype, tp) * block_size
        return KVGroups((FullLayer(block_size, page),), page)
    full, windowed = (_token_bytes(config, kind, kv_dtype, tp) for kind in (FULL, SLIDING))
    state = _state_bytes(config, tp) if LINEAR in kinds else 0
    # A state is saved at such boundaries.
    step = math.lcm(block_size, GDN_CHECKPOINT_TOKENS) if state and gdn_checkpoints else block_size
    block_size = max(block_size, step * -(-state // (step * full)))  # a page holds a state
    of_kind = {
        FULL: FullLayer(block_size, full * block_size),
        SLIDING: WindowLayer(block_size, windowed * block_size, config.hf_text_config.get("sliding_window") or 1),
        LINEAR: StateLayer(block_size, full * block_size, states or 2 + gdn_checkpoints),
    }
    in_flight = steps_in_flight * positive_count("max_num_batched_tokens", max_num_batched_tokens)
    return form_groups([of_kind[kind] for kind in kinds], in_flight)


def form_groups(layers: Sequence[FullLayer], in_flight: int = 0) -> KVGroups:
    """Group layers of the same kind: as many per group as the rarest kind has, or the most common
    kind if the two numbers are close.

    Pages are made equal first: a smaller page takes more tokens if its size divides the largest,
    otherwise it is padded.
    """
    if len({replace(layer, page_bytes=0) for layer in layers}) == 1:
        return KVGroups(tuple(layers[:1]), sum(layer.page_bytes for layer in layers), in_flight)
    # All kinds take blocks from one pool, so their pages are equal.
    page = max(layer.page_bytes for layer in layers)
    counts = Counter(_with_page(layer, page) for layer in layers)
    fewest, most = min(counts.values()), max(counts.values())
    # Layers in a group; the last group of a kind may be padded.
    size = most if most < PADDED_BELOW * fewest else fewest
    groups = tuple(layer for layer, count in counts.items() for _ in range(-(-count // size)))
    return KVGroups(groups, size * page, in_flight)


def _with_page(layer: FullLayer, page_bytes: int) -> FullLayer:
    # Tokens in place of padding, if the sizes divide.
    more = page_bytes // layer.page_bytes if page_bytes % layer.page_bytes == 0 else 1
    return replace(layer, block_size=layer.block_size * more, page_bytes=page_bytes)


def _token_bytes(config: ModelConfig, kind: str, kv_dtype: str, tp: int) -> int:
    """Return the bytes per token in one layer. Gemma 4's full-attention layers have a different
    head size.
    """
    hf = config.hf_text_config
    own = {"head_dim": hf.get("global_head_dim")}
    if hf.get("attention_k_eq_v"):
        own["num_key_value_heads"] = hf.get("num_global_key_value_heads")
    # transformers 5 has settings by layer, equal for all these layers.
    own = next(iter((hf.get("per_layer_config") or {}).values()), own)
    if kind == FULL:
        config = replace(config, **{name: own[name] for name in ("head_dim", "num_key_value_heads") if own.get(name)})
    return layer_bytes_per_token(config, kv_dtype, tp)


def _state_bytes(config: ModelConfig, tp: int) -> int:
    """Return the size of a gated delta net's state on one GPU in bytes: the last inputs of its
    convolution, and the matrix.

    In vLLM v0.33.0: `gated_delta_net_state_shape` in
    `vllm/model_executor/layers/mamba/mamba_utils.py`.
    """
    hf = config.hf_text_config
    keys, values, key_width, value_width, kernel = (hf.get(name) or 0 for name in GDN_FIELDS)
    if not keys or not values or not kernel:
        raise UnsupportedModelError(f"{config.model_type}: its config lacks one of {', '.join(GDN_FIELDS)}")
    if keys % tp or values % tp:
        raise MinivllmError(f"{keys} and {values} heads of linear attention cannot be divided over {tp} GPUs")
    dtype = serving_dtype(config)
    # The convolution's last inputs: queries and keys, and values.
    convolved = (2 * keys * key_width + values * value_width) // tp * (kernel - 1) * bytes_of_dtype(dtype)
    return convolved + values // tp * key_width * value_width * bytes_of_dtype(hf.get("mamba_ssm_dtype") or dtype)
