"""Read the shape of a model from its `config.json`, however its family spells it.

Configs of different families name the same field differently, omit their family's defaults, and put
the language model's part of a multimodal model into a nested config. The result here is always the
same: the fields of `config.model.ModelConfig`.

In vLLM: `vllm/transformers_utils/model_arch_config_convertor.py`.
"""

from collections.abc import Mapping
from typing import Any

from minivllm.config.cache_kinds import cache_exception, window_of_layers
from minivllm.config.checks import is_count, is_number
from minivllm.errors import MinivllmError

# Other names that configs use for the same field; the first one present is used.
ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "seq_length", "max_seq_len"),
    "rms_norm_eps": ("layer_norm_epsilon", "layer_norm_eps"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
NESTED_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
OUTER_FIELDS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "eos_token_id")
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2", "opt")
# Types of the fields that are read without any other check. If a field is missing or null, the
# family's default holds.
KINDS = {
    "model_type": (str, "a text"),
    "architectures": (list, "a list of names"),
    "layer_types": (list | tuple, "a list of names"),
    "quantization_config": (Mapping, "a mapping"),
    "rope_parameters": (Mapping, "a mapping"),
    "rope_scaling": (Mapping, "a mapping"),
    "sliding_window": (int, "a whole number"),
}
ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor",
)  # fmt: skip
MAX_ROPE_NUMBER = 1e15
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def model_fields(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` from the contents of a `config.json`.

    Raises:
        MinivllmError: a required field is missing or invalid; the message names it.
    """
    hf = _with_usual_names(text_config(hf_config))
    _check_kinds(hf)
    exception = cache_exception(hf)
    # Models that are only counted, not run, need fewer fields.
    shape = _attention_shape(hf, exception)
    window, kinds = window_of_layers(hf, shape["num_hidden_layers"])
    if kinds is not None and len(kinds) != shape["num_hidden_layers"]:
        raise MinivllmError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {shape['num_hidden_layers']}")
    rope_theta, rope_scaling = _rope(hf)
    return dict(
        **shape,
        **_biases(hf),
        **_experts(hf, shape["num_hidden_layers"]),
        intermediate_size=_count(hf, "intermediate_size") or _gpt2_mlp(hf),
        vocab_size=_count(hf, "vocab_size"),
        max_position_embeddings=_count(hf, "max_position_embeddings"),
        architecture=(hf.get("architectures") or [ARCHITECTURES.get(hf.get("model_type", ""), "")])[0],
        model_type=hf.get("model_type") or "",
        dtype=_dtype(hf),
        rms_norm_eps=_positive(hf, "rms_norm_eps", 1e-6),
        hidden_act=hf.get("hidden_activation") or hf.get("hidden_act") or hf.get("activation_function") or "silu",
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", hf.get("model_type") in TIED_BY_DEFAULT)),
        sliding_window=window,
        layer_types=kinds,
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
        quantization=(hf.get("quantization_config") or {}).get("quant_method"),
        quantization_config=dict(hf.get("quantization_config") or {}) or None,
        checkpoint_kv_dtype=_checkpoint_kv_dtype(hf.get("quantization_config")),
        cache_exception=exception,
        hf_config=dict(hf_config),
    )


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's config; for a multimodal model, with fields found only in the
    outer config added.
    """
    for name in NESTED_TEXT_CONFIGS:
        inner = hf_config.get(name)
        if isinstance(inner, Mapping):
            outer = {key: hf_config[key] for key in OUTER_FIELDS if hf_config.get(key) is not None}
            # The inner config goes before the outer one.
            own = {key: value for key, value in inner.items() if value is not None}
            # Except for this one, which the outer config decides.
            tied = {"tie_word_embeddings": outer["tie_word_embeddings"]} if "tie_word_embeddings" in outer else {}
            return {**outer, **own, **tied}
    return dict(hf_config)


def _with_usual_names(hf: dict[str, Any]) -> dict[str, Any]:
    for name, others in ALIASES.items():
        if hf.get(name) is None:
            hf[name] = next((hf[other] for other in others if hf.get(other) is not None), None)
    return hf


def _check_kinds(hf: Mapping[str, Any]) -> None:
    for name, (kind, words) in KINDS.items():
        value = hf.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise MinivllmError(f"the model config's {name!r} must be {words}, not {value!r}")


def _count(hf: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return an optional count: `default` if the config lacks it. Raise if it is not a positive
    integer.
    """
    number: Any = hf.get(name)
    if number is None:
        return default
    if not is_count(number, 1) or number >= 2**63:
        raise MinivllmError(f"the model config's {name!r} must be a positive whole number below 2^63, not {number!r}")
    return int(number)


def _positive(hf: Mapping[str, Any], name: str, default: float) -> float:
    """Return an optional number: `default` if the config lacks it. Raise if it is not above 0."""
    value = hf.get(name)
    if value is None:
        return default
    if not (is_number(value) and value > 0):
        raise MinivllmError(f"the model config's {name!r} must be a number above 0, not {value!r}")
    return float(value)


def _required_count(hf: Mapping[str, Any], name: str) -> int:
    if hf.get(name) is None:
        raise MinivllmError(f"the model config lacks {name!r}")
    return _count(hf, name)


def _attention_shape(hf: Mapping[str, Any], exception: str | None) -> dict[str, Any]:
    """Return the numbers of layers and heads, and the widths; without attention heads (Mamba)
    the head counts are 0.
    """
    # State-space models have layers, but nothing that attends.
    if exception and hf.get("num_attention_heads") is None:
        layers = _count(hf, "num_hidden_layers")
        return {"num_hidden_layers": layers, "num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0}
    layers, heads = _required_count(hf, "num_hidden_layers"), _required_count(hf, "num_attention_heads")
    kv_heads = _kv_heads(hf, heads)
    # Models that are only counted may have other rules.
    if heads % kv_heads and not exception:
        raise MinivllmError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    hidden = _count(hf, "hidden_size")
    latent = {}
    if hf.get("kv_lora_rank") is not None:
        latent = {
            "kv_lora_rank": _count(hf, "kv_lora_rank"),
            "qk_rope_head_dim": _required_count(hf, "qk_rope_head_dim"),
            "qk_nope_head_dim": _count(hf, "qk_nope_head_dim"),
            "v_head_dim": _count(hf, "v_head_dim"),
            "q_lora_rank": _count(hf, "q_lora_rank"),
        }
    head_dim = _count(hf, "head_dim")
    if not head_dim:
        if not hidden:
            raise MinivllmError("the model config lacks 'head_dim', and 'hidden_size' to derive it from")
        if hidden % heads and not latent and not exception:
            raise MinivllmError(
                f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); give 'head_dim'"
            )
        head_dim = hidden // heads
    return {**shape, **latent, "head_dim": head_dim, "hidden_size": hidden}


def _gpt2_mlp(hf: Mapping[str, Any]) -> int:
    """Return the width of GPT-2's MLP: four times the hidden size, which its config does not state."""
    return 4 * _count(hf, "hidden_size") if hf.get("model_type") == "gpt2" else 0


def _kv_heads(hf: Mapping[str, Any], heads: int) -> int:
    """Return the number of KV heads: one if `multi_query` is on (Falcon); by default the number of
    query heads.
    """
    if hf.get("multi_query") and not hf.get("new_decoder_architecture"):
        return 1
    return _count(hf, "num_key_value_heads", default=heads)


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling`.
    """
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if isinstance(parameters.get("full_attention"), Mapping):  # one set of parameters per layer kind
        parameters = parameters["full_attention"]
    for name in ROPE_NUMBERS:
        value = parameters.get(name)
        if value is not None and not (is_number(value) and 0 <= value <= MAX_ROPE_NUMBER):
            raise MinivllmError(
                f"{name!r} in the model config's rope parameters must be from 0 to {MAX_ROPE_NUMBER:.0e}, not {value!r}"
            )
    theta = _positive(parameters, "rope_theta", _positive(hf, "rope_theta", 10000.0))
    # transformers 5 puts the base into the same dictionary.
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "type")}
    scaling["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    return theta, None if scaling["rope_type"] == "default" else scaling


def _biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return which biases and norms the model has: Qwen2's biases are implied by its type, other
    configs state theirs.
    """
    family = hf.get("model_type") or ""
    says = bool(hf.get("attention_bias"))
    # Qwen2 has biases in q, k and v, and none in the output projection; its config does not mention
    # them.
    qwen2 = family in ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
    return {
        "attention_bias": qwen2 or says,
        "attention_output_bias": says and not qwen2,
        "mlp_bias": bool(hf.get("mlp_bias")),
        "qk_norm": family in ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma3_text"),
    }


def _experts(hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the experts, if any layer has them: DeepSeek's first layers are dense, and may be all
    of its layers.
    """
    experts = _count(hf, "num_experts")
    # Zero is valid here, and `_count` refuses it.
    dense = _count(hf, "first_k_dense_replace") if hf.get("first_k_dense_replace") else 0
    if not experts or dense >= layers:
        return {}
    return {
        "num_experts": experts,
        "num_experts_per_tok": _count(hf, "num_experts_per_tok"),
        "moe_intermediate_size": _count(hf, "moe_intermediate_size") or _count(hf, "intermediate_size"),
        "num_shared_experts": _count(hf, "n_shared_experts") if hf.get("n_shared_experts") else 0,
        "num_dense_layers": dense,
    }


def _dtype(hf: Mapping[str, Any]) -> str:
    """Return the dtype of the stored weights; float32 if the config names none, as in
    transformers.
    """
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    # Some configs were written from torch's own name, "torch.bfloat16".
    return str(value).removeprefix("torch.")


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise MinivllmError(f"the model config's 'eos_token_id' must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _checkpoint_kv_dtype(quantization: Any) -> str | None:
    """Return the KV-cache dtype that a quantized checkpoint specifies (ModelOpt,
    compressed-tensors), or None.
    """
    if not isinstance(quantization, Mapping):
        return None
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        # compressed-tensors: {"type": "float", "num_bits": 8} is fp8.
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return {"fp8": "fp8", "float8": "fp8", "nvfp4": "nvfp4", "float4": "nvfp4"}.get(str(scheme).lower())
