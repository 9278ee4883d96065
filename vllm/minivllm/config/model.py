"""The shape of a model, read from the `config.json` of a Hugging Face model.

In vLLM: `vllm/config/model.py`, `ModelConfig`, and `vllm/transformers_utils/model_arch_config_convertor.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.config.cache_kinds import FULL, cache_exception, counted_layer_types, window_of_layers
from minivllm.config.checks import is_count, is_number
from minivllm.errors import MinivllmError

MODELS = Path(__file__).resolve().parents[2] / "models"
EMBEDDED_MODEL, EMBEDDED_DRAFT, EMBEDDED_EAGLE3 = (
    MODELS / name for name in ("tiny-python", "tiny-python-draft", "tiny-python-eagle3")
)

EMBEDDED_SIBLINGS = {kind: MODELS / f"tiny-python-{kind}" for kind in ("mha", "gqa", "mqa", "mla")}
"""Four small models that were trained alike, and differ in what their attention shares."""

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
OUTER_FIELDS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id")
TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gpt2", "opt")
# Fields that are left out where they have the family's default, by configs of several parts.
PART_DEFAULTS = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}  # fmt: skip
HUB_TIMEOUT = 10  # seconds
# Types of the fields that are read without any other check. If a field is missing or null, the family's default holds.
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
# Settings that make a family compute something other than Llama, and the values at which they have no effect.
OTHER_COMPUTATION = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "dim_model_base": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": ([],),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1.0,),
    "scale_depth": (),
    "scale_emb": (1.0,),
}
ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder and the memory arithmetic need to know about a model. Zero: the config does not say."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    architecture: str = ""
    model_type: str = ""
    dtype: str = "bfloat16"
    """The dtype of the stored weights: float32, float16, bfloat16, ..."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None for unscaled RoPE, else a dict with the key `rope_type`: linear, dynamic, llama3, yarn, ..."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k is normalized before RoPE (Qwen3)."""
    sliding_window: int | None = None
    """The window of *every* layer, in tokens; None if there is no window or if layers differ."""
    layer_types: tuple[str, ...] | None = None
    kv_lora_rank: int | None = None
    """Width of the latent vector of multi-head latent attention (DeepSeek); None for ordinary attention."""
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    q_lora_rank: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Number of leading layers with a dense MLP in a mixture-of-experts model."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    """Quantization method of the checkpoint (fp8, awq, gptq, ...); None if it is not quantized."""
    quantization_config: dict[str, Any] | None = field(default=None, hash=False)
    """The checkpoint's own description of its quantization: bits, groups, layers, ..., as its method spells them."""
    checkpoint_kv_dtype: str | None = None
    """The KV-cache dtype that a quantized checkpoint asks for; None if it does not ask for one."""
    other_computation: str | None = None
    """The first setting that requires a computation the Llama family does not have; None if no setting does."""
    cache_exception: str | None = None
    """Why one formula cannot give the bytes per token; None for models that cache every token in every layer."""
    counted_layer_types: tuple[str, ...] | None = None
    """The kinds of the layers with a cache of their own, if they differ and are counted (`minivllm.memory`)."""
    hf_config: dict[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """The contents of the whole `config.json`: of a multimodal model, also the parts beside the language model."""
    checkpoint_bytes: int | None = field(default=None, compare=False)
    """The bytes of the checkpoint's tensors, if it is a local directory that holds them."""

    @property
    def hf_text_config(self) -> dict[str, Any]:
        """The language model's part of `hf_config`."""
        return _text_config(self.hf_config)

    @property
    def keeps_every_token(self) -> bool:
        """Return whether every layer caches the key and value of every token."""
        windows = self.sliding_window is not None or set(self.layer_types or (FULL,)) != {FULL}
        return self.cache_exception is None and not windows

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head are rotated: all, or with a latent cache the part that is kept beside it."""
        return self.head_dim if self.kv_lora_rank is None else self.qk_rope_head_dim or 0

    @property
    def latent_width(self) -> int:
        """Numbers that a token leaves in one layer's latent cache; 0 for ordinary attention."""
        return 0 if self.kv_lora_rank is None else self.kv_lora_rank + self.rotary_dim

    @classmethod
    def from_dict(cls, hf_config: Mapping[str, Any]) -> "ModelConfig":
        """Read the contents of a `config.json`, in the old style or that of transformers 5, nested text configs too.

        Raises:
            MinivllmError: a required field is missing or invalid; the message names it.
        """
        if not isinstance(hf_config, Mapping):
            raise MinivllmError(f"a model config is a mapping of names to values, not {type(hf_config).__name__}")
        hf = _with_usual_names(_text_config(hf_config))
        _check_kinds(hf)
        exception = cache_exception(hf)
        shape = _attention_shape(hf, exception)
        window, kinds = window_of_layers(hf, shape["num_hidden_layers"])
        if kinds is not None and len(kinds) != shape["num_hidden_layers"]:
            raise MinivllmError(
                f"layer_types lists {len(kinds)} layers, num_hidden_layers is {shape['num_hidden_layers']}"
            )
        rope_theta, rope_scaling = _rope(hf)
        return cls(
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
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=_token_ids(hf.get("eos_token_id")),
            quantization=(hf.get("quantization_config") or {}).get("quant_method"),
            quantization_config=dict(hf.get("quantization_config") or {}) or None,
            checkpoint_kv_dtype=_checkpoint_kv_dtype(hf.get("quantization_config")),
            other_computation=_other_computation(hf),
            cache_exception=exception,
            counted_layer_types=counted_layer_types(hf, shape["num_hidden_layers"]),
            hf_config=dict(hf_config),
        )

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path) -> "ModelConfig":
        """Read the config of a local model directory, of a `config.json`, or of a model on the Hugging Face Hub.

        Raises:
            MinivllmError: there is no such model, the Hub cannot be reached, or the file is not a model config.
        """
        path = config_path(path_or_name)
        contents = read_json_object(path)
        try:
            return replace(cls.from_dict(contents), checkpoint_bytes=_checkpoint_bytes(path.parent))
        except MinivllmError as error:
            raise type(error)(f"{path_or_name}: {error}") from error

    def require(self, *names: str) -> None:
        """Raise a `MinivllmError` that names the first of these fields missing from the config."""
        for name in names:
            if not getattr(self, name):
                raise MinivllmError(f"the model config lacks {name!r}, which is needed here")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        MinivllmError: the file cannot be read, or does not hold a JSON object.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MinivllmError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise MinivllmError(f"{path} holds {type(contents).__name__}, not a mapping of names to values")
    return contents


def _checkpoint_bytes(directory: Path) -> int | None:
    """Return the bytes of the tensors in a directory's safetensors files, or None without such files."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        metadata = read_json_object(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        return total if is_count(total, 1) else None
    if not (file := directory / "model.safetensors").is_file():
        return None
    with file.open("rb") as stream:  # eight bytes give the length of the header before the tensors
        return max(0, file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little"))


def config_path(path_or_name: str | Path) -> Path:
    """Return the `config.json` of a local model directory (or that file itself), else of a model on the Hub.

    Raises:
        MinivllmError: there is no such local file, and no model of that name can be fetched.
    """
    name, path = str(path_or_name), local_path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise MinivllmError(f"{path} has no config.json; a model directory has one beside its weights")
        return path / "config.json"
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise MinivllmError(f"there is no model directory {name!r}")
    return hub_file(name, "config.json")


def local_path(path_or_name: str | Path) -> Path:
    """Return the local path that this name would have; it need not exist.

    Raises:
        MinivllmError: the name is not a valid path.
    """
    name = str(path_or_name)
    if not name or "\0" in name:
        raise MinivllmError(f"there is no model directory {name!r}")
    try:
        path = Path(name).expanduser()
        path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # name too long, or the home of an unknown user
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        reason = error.strerror if isinstance(error, OSError) else error
        raise MinivllmError(f"there is no model directory {shown!r}: {reason}") from None
    return path


def hub_file(name: str, filename: str) -> Path:
    """Return a file of a model on the Hugging Face Hub, from the local cache or downloaded.

    Raises:
        MinivllmError: the Hub does not have the model or the file, or cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, filename)
        if isinstance(cached, str):
            return Path(cached)
        get_hf_file_metadata(hf_hub_url(name, filename), timeout=HUB_TIMEOUT)  # fails at once; a download would retry
        return Path(hf_hub_download(name, filename))
    except Exception as error:  # the Hub client raises errors of several libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MinivllmError(
            f"{name!r} is no local directory, and {filename} cannot be fetched from the Hugging Face hub ({reason}); "
            f"give a local model directory, or check the name and the network"
        ) from error


def _text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's config; for a multimodal model, with fields found only in the outer config added."""
    for name in NESTED_TEXT_CONFIGS:
        inner = hf_config.get(name)
        if isinstance(inner, Mapping):
            outer = {key: hf_config[key] for key in OUTER_FIELDS if hf_config.get(key) is not None}
            defaults = PART_DEFAULTS.get(str(inner.get("model_type")), {})
            given = {**defaults, **outer, **{key: value for key, value in inner.items() if value is not None}}
            return (
                given
                if "tie_word_embeddings" not in outer
                else {**given, "tie_word_embeddings": outer["tie_word_embeddings"]}
            )
    return dict(hf_config)


def _with_usual_names(hf: dict[str, Any]) -> dict[str, Any]:
    for name, others in ALIASES.items():
        if hf.get(name) is None:
            found = next((hf[other] for other in others if hf.get(other) is not None), None)
            if found is not None:
                hf[name] = found
    return hf


def _check_kinds(hf: Mapping[str, Any]) -> None:
    for name, (kind, words) in KINDS.items():
        value = hf.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise MinivllmError(f"the model config's {name!r} must be {words}, not {value!r}")


def _count(hf: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return an optional count: `default` if the config lacks it, an error if it is not a positive integer."""
    of_layers: Any = hf.get(name)
    if isinstance(of_layers, list | tuple) and len(set(map(str, of_layers))) == 1:
        return _count({name: of_layers[0]}, name, default)  # the same number for each layer
    value: Any = hf.get(name)
    if value is None:
        return default
    if not is_count(value, 1) or value >= 2**63:
        raise MinivllmError(f"the model config's {name!r} must be a positive whole number below 2^63, not {value!r}")
    return int(value)


def _positive(hf: Mapping[str, Any], name: str, default: float) -> float:
    """Return an optional number: `default` if the config lacks it, an error if it is not above 0."""
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
    """Numbers of layers and heads, and widths; for models without attention heads (Mamba) the head counts are 0."""
    if exception and hf.get("num_attention_heads") is None:
        layers = _count(hf, "num_hidden_layers")
        return {"num_hidden_layers": layers, "num_attention_heads": 0, "num_key_value_heads": 0, "head_dim": 0}
    layers, heads = _required_count(hf, "num_hidden_layers"), _required_count(hf, "num_attention_heads")
    kv_heads = _kv_heads(hf, heads)
    if heads % kv_heads and not exception:
        raise MinivllmError(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
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
                f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}); give 'head_dim'"
            )
        head_dim = hidden // heads
    return {**shape, **latent, "head_dim": head_dim, "hidden_size": hidden}


def _gpt2_mlp(hf: Mapping[str, Any]) -> int:
    """Return the width of GPT-2's MLP: four times the hidden size, which its config does not say."""
    return 4 * _count(hf, "hidden_size") if hf.get("model_type") == "gpt2" else 0


def _kv_heads(hf: Mapping[str, Any], heads: int) -> int:
    """Return the number of KV heads: one if `multi_query` is on (Falcon), and by default as many as query heads."""
    if hf.get("multi_query") and not hf.get("new_decoder_architecture"):
        return 1
    return _count(hf, "num_key_value_heads", default=heads)


def _rope(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return RoPE base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if isinstance(given.get("full_attention"), Mapping):  # one set of parameters per layer kind
        given = given["full_attention"]
    for name in ROPE_NUMBERS:
        value = given.get(name)
        if value is not None and not (is_number(value) and 0 <= value <= MAX_ROPE_NUMBER):
            raise MinivllmError(
                f"{name!r} in the model config's rope parameters must be from 0 to {MAX_ROPE_NUMBER:.0e}, not {value!r}"
            )
    theta = _positive(given, "rope_theta", _positive(hf, "rope_theta", 10000.0))
    scaling = {key: value for key, value in given.items() if key not in ("rope_theta", "type")}
    scaling["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    return theta, None if scaling["rope_type"] == "default" else scaling


def _biases(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return which biases and norms there are: Qwen2's biases are implied by its type, other configs state theirs."""
    family = hf.get("model_type") or ""
    says = bool(hf.get("attention_bias"))
    qwen2 = family in ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
    return {
        "attention_bias": qwen2 or says,
        "attention_output_bias": says and not qwen2,
        "mlp_bias": bool(hf.get("mlp_bias")),
        "qk_norm": family in ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gemma3_text"),
    }


def _other_computation(hf: Mapping[str, Any]) -> str | None:
    given = ((name, hf.get(name), usual) for name, usual in OTHER_COMPUTATION.items())
    return next((f"{name}={value!r}" for name, value, usual in given if value is not None and value not in usual), None)


def _experts(hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the experts, if any layer has them: DeepSeek's first layers have none, and that may be all of them."""
    experts = _count(hf, "num_experts")
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
    """Return the dtype of the stored weights; float32 if the config names none, as in transformers."""
    value = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    return {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
        name, name
    )


def _token_ids(value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise MinivllmError(f"the model config's 'eos_token_id' must be a token id or several, not {value!r}")
    return tuple(ids)


def _checkpoint_kv_dtype(quantization: Any) -> str | None:
    """Return the KV-cache dtype that a quantized checkpoint asks for (ModelOpt, compressed-tensors), or None."""
    if not isinstance(quantization, Mapping):
        return None
    scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        scheme = f"{scheme.get('type')}{scheme.get('num_bits')}"
    return {"fp8": "fp8", "float8": "fp8", "nvfp4": "nvfp4", "float4": "nvfp4"}.get(str(scheme).lower())
