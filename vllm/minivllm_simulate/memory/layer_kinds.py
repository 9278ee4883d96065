"""The kinds of a model's layers, where they differ in what they keep of a request and are counted."""

from minivllm.config import ModelConfig
from minivllm.config.cache_kinds import FULL, SLIDING
from minivllm.config.checks import is_count

LINEAR = "linear_attention"
# Types of layers of several kinds whose cache is counted: by default
# every n-th layer keeps every token, and the others are of the second kind.
LAYER_PATTERNS = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), (2, SLIDING)),
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "cwm", "exaone4", "exaone_moe", "olmo3"), (4, SLIDING)),
    "gemma3n_text": (5, SLIDING),
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gemma4_unified_text"), (6, SLIDING)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), (4, LINEAR)),
    "llama4_text": (4, FULL),  # chunked local attention is allocated like full attention, by default
}


def counted_layer_types(config: ModelConfig) -> tuple[str, ...] | None:
    """Return the kind of each layer with a cache of its own, or None if any of these kinds cannot
    be counted.

    The last `num_kv_shared_layers` layers (Gemma 3n and 4) use the cache of another layer.
    """
    hf_config, num_hidden_layers = config.hf_text_config, config.num_hidden_layers
    model_type, window = hf_config.get("model_type") or "", hf_config.get("sliding_window")
    listed = hf_config.get("layer_types")
    if model_type in ("mistral", "ministral") and window:
        listed = listed or (SLIDING,) * num_hidden_layers
    elif model_type not in LAYER_PATTERNS:
        return None
    # The config may state the period; otherwise the family's default holds.
    period, other = LAYER_PATTERNS.get(model_type, (None, FULL))
    period = hf_config.get("sliding_window_pattern") or hf_config.get("full_attention_interval") or period
    if not listed and not is_count(period, 1):
        return None
    kinds = listed or [other if (layer + 1) % period else FULL for layer in range(num_hidden_layers)]
    # Chunks limit what attends, not what is allocated.
    kinds = tuple(FULL if kind == "chunked_attention" else kind for kind in kinds)
    if not set(kinds) <= {FULL, SLIDING, LINEAR} or (SLIDING in kinds and not window):
        return None
    return kinds[: max(0, num_hidden_layers - (hf_config.get("num_kv_shared_layers") or 0))] or None
