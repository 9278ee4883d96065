"""The models that cache the key and value of every token in every layer, and the layers of others
that do not.

Only for the former does one formula give the bytes per token, and only those models can run.
State-space layers keep one state, however long the sequence; sliding-window layers forget old
tokens; some layers share another layer's cache, and some keep a second one. Such models are listed
here with the reason, so that nothing counts their cache as if it were an ordinary one.

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

STATE = "some of its layers keep one fixed-size state instead of the keys and values of every token"
WINDOW = "some of its layers keep only the tokens inside a window"
SHARED = "some of its layers use the cache of another layer"
SECOND = "its layers keep a second cache beside keys and values"
CROSS = "its decoder also keeps the keys and values of another input (cross-attention)"
UNEQUAL = "its layers differ in heads, so no single figure holds for all of them"

OTHER_TYPES = {
    **dict.fromkeys((
        "bailing_moe_linear", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "hymba", "jamba", "kimi_linear",
        "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "minimax_m1", "minimax_text_01", "nemotron_h", "olmo_hybrid",
        "plamo2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv",
        "rwkv5", "rwkv6", "rwkv7", "xlstm", "zamba", "zamba2",
    ), STATE),
    **dict.fromkeys((
        "afmoe", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "gpt_neo", "gpt_oss", "llama4", "llama4_text",
        "mimo_v2_flash", "ministral", "olmo3", "phi3small", "smallthinker",
    ), WINDOW),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "phi4flash"), SHARED),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa"), SECOND),
    **dict.fromkeys(("bart", "mbart", "mllama", "mllama_text_model", "pegasus", "t5", "whisper"), CROSS),
    **dict.fromkeys(("decilm", "nemotron-nas", "openelm"), UNEQUAL),
}  # fmt: skip

# Config fields that only such models have, whatever their `model_type`. Null, false, zero and empty
# values are ignored.
TELLING_FIELDS = {
    **dict.fromkeys((
        "attn_layer_idx", "attn_layer_indices", "attn_layer_period", "block_types", "conv_L_cache", "full_attn_idxs",
        "full_attention_interval", "hybrid_override_pattern", "layers_block_type", "linear_attn_config",
        "linear_num_key_heads", "linear_num_value_heads", "lru_width", "mamba_d_state", "mamba_n_heads",
        "mamba_num_heads", "ssm_cfg", "ssm_state_size", "state_size",
    ), STATE),
    **dict.fromkeys((
        "attention_chunk_size", "attention_types", "hybrid_layer_pattern", "interleaved_sliding_window",
        "sliding_window_layout", "sliding_window_pattern",
    ), WINDOW),
    **dict.fromkeys(("cla_share_factor", "num_kv_shared_layers", "use_cla"), SHARED),
    **dict.fromkeys(("compress_ratios", "index_head_dim", "index_topk"), SECOND),
    **dict.fromkeys(("cross_attention_layers", "is_encoder_decoder"), CROSS),
    **dict.fromkeys(("block_configs", "num_key_value_heads_per_layer", "per_layer_config"), UNEQUAL),
}  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"


def cache_exception(hf_config: Mapping[str, Any]) -> str | None:
    """Return why this model does not cache every token in every layer, or None if it does.

    A config without `model_type` is judged by its fields alone. An unknown type is rejected, unless
    `layer_types` says that every layer is full attention: a wrong count is worse than none. For
    sliding windows, see `window_of_layers`.

    Args:
        hf_config: the model's (text) config, as in its `config.json`.
    """
    model_type = hf_config.get("model_type") or ""
    if model_type in OTHER_TYPES:
        return OTHER_TYPES[model_type]
    # A new family has an unknown type, but its fields may give it away.
    for name, reason in TELLING_FIELDS.items():
        if hf_config.get(name):
            return f"{reason} (its config has {name!r})"
    if 0 in (hf_config.get("attn_type_list") or ()):  # MiniMax: 1 is attention, 0 a linear layer
        return STATE
    kinds = hf_config.get("layer_types") or ()
    strange = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if strange:
        return f"not every layer keeps every token (its layer_types have {strange[0]!r})"
    if model_type and model_type not in EVERY_TOKEN_TYPES and set(kinds) != {FULL}:
        return f"it is not known whether every layer of a {model_type!r} model keeps every token"
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
