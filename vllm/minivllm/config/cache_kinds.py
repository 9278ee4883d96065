"""The models that cache the key and value of every token in every layer.

Only for these does one formula give the bytes per token, and only these can run. In other models
state-space layers keep one state, however long the sequence; sliding-window layers forget old
tokens; some layers share another layer's cache, and some keep a second one.

In vLLM: `vllm/v1/kv_cache_interface.py`, where each layer kind has its own spec
(`FullAttentionSpec`, `SlidingWindowSpec`, `MambaSpec`, ...).
"""

from collections.abc import Mapping
from typing import Any

# In these, every layer is ordinary or multi-head latent attention over all tokens.
EVERY_TOKEN_TYPES = frozenset({
    "apertus", "aquila", "arcee", "baichuan", "bloom", "chatglm", "codegen", "cohere", "deepseek", "deepseek_v2",
    "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "falcon", "gemma", "glm", "glm4", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared", "helium", "internlm", "internlm2",
    "internlm3", "kimi_k2", "llama", "minicpm", "minimax_m2", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text",
    "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text",
    "qwen3_vl_text", "seed_oss", "smollm3", "solar", "stablelm", "starcoder2", "xverse", "yi",
})  # fmt: skip

# Config fields that only other models have, whatever their `model_type`. Null, false, zero and empty
# values are ignored.
TELLING_FIELDS = (
    "attention_chunk_size", "attention_types", "attn_layer_idx", "attn_layer_indices", "attn_layer_period",
    "block_configs", "block_types", "cla_share_factor", "compress_ratios", "conv_L_cache", "cross_attention_layers",
    "full_attention_interval", "full_attn_idxs", "hybrid_layer_pattern", "hybrid_override_pattern", "index_head_dim",
    "index_topk", "interleaved_sliding_window", "is_encoder_decoder", "layers_block_type", "linear_attn_config",
    "linear_num_key_heads", "linear_num_value_heads", "lru_width", "mamba_d_state", "mamba_n_heads", "mamba_num_heads",
    "num_key_value_heads_per_layer", "num_kv_shared_layers", "per_layer_config", "sliding_window_layout",
    "sliding_window_pattern", "ssm_cfg", "ssm_state_size", "state_size", "use_cla",
)  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"


def cache_exception(hf_config: Mapping[str, Any]) -> str | None:
    """Return why this model does not cache every token in every layer, or None if it does.

    A config without `model_type` is judged by its fields alone. A type that is not listed is
    rejected, unless `layer_types` says that every layer is full attention: a wrong count is worse
    than none. For sliding windows, see `window_of_layers`.

    Args:
        hf_config: the model's (text) config, as in its `config.json`.
    """
    model_type = hf_config.get("model_type") or ""
    telling = next((name for name in TELLING_FIELDS if hf_config.get(name)), None)
    if telling is not None:
        return f"not every layer keeps every token (its config has {telling!r})"
    kinds = hf_config.get("layer_types") or ()
    strange = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if strange:
        return f"not every layer keeps every token (its layer_types have {strange[0]!r})"
    if model_type and model_type not in EVERY_TOKEN_TYPES and set(kinds) != {FULL}:
        return f"not every layer of a {model_type!r} model is known to keep every token"
    return None


def window_of_layers(hf_config: Mapping[str, Any], num_hidden_layers: int) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the window shared by *every* layer (else None), and each layer's kind if the config
    lists or implies it.

    `layer_types` takes precedence over `sliding_window`. Qwen2's `use_sliding_window` turns the
    window on, and its `max_window_layers` is the index of the first layer that has it.

    Returns:
        `(sliding_window, layer_types)`, with the window in tokens.
    """
    window = hf_config.get("sliding_window")
    kinds = tuple(hf_config.get("layer_types") or ()) or None
    is_qwen = (hf_config.get("model_type") or "").startswith("qwen")
    if window is None or not hf_config.get("use_sliding_window", not is_qwen):
        window = None
    elif kinds is None and is_qwen:
        # Qwen2 counts from the bottom: layers below this index attend to everything.
        first = hf_config.get("max_window_layers") or 0
        kinds = tuple(SLIDING if layer >= first else FULL for layer in range(num_hidden_layers))
    if kinds is not None and set(kinds) != {SLIDING}:
        window = None
    return window, kinds
