"""KV-cache bytes per token, and how many tokens and requests a cache holds.

These are counts, not estimates; they equal what vLLM prints at start-up ("GPU KV cache size",
"Maximum concurrency"). Only models in which every layer caches every token have a fixed number of
bytes per token; for others see `minivllm_simulate.memory`.

In vLLM v0.33.0: `vllm/v1/kv_cache_interface.py` (`AttentionSpec.page_size_bytes`).
"""

from collections.abc import Mapping
from typing import Any

from minivllm.config import ModelConfig
from minivllm.config.cache import KV_CACHE_DTYPES
from minivllm.config.checks import is_number, positive_count, require
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError, UnsupportedModelError

Model = ModelConfig | Mapping[str, Any]

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
SCALE_BYTES = 4  # one float32 scale per token and head, for each of K and V
# Formats whose bytes are known: those that the engine stores, and further ones of vLLM.
KV_DTYPES = tuple(dict.fromkeys(("auto", *DTYPE_BYTES, *KV_CACHE_DTYPES, "fp8_per_token_head", "nvfp4")))


def kv_bytes_per_token(model: Model, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Return the bytes that one token occupies in the KV cache of *one* GPU, over all layers.

    `2 * layers * KV heads * head_dim * bytes`, the 2 being K and V. KV heads are divided over `tp`
    GPUs; if there are more GPUs than heads, the heads are replicated. Multi-head latent attention
    instead caches one latent vector and the rotary part of the key, replicated on every GPU:
    `layers * (kv_lora_rank + qk_rope_head_dim) * bytes`.

    Args:
        model: a ModelConfig or the contents of a `config.json`.
        kv_dtype: "auto" is what vLLM would choose: the dtype that a quantized checkpoint asks for,
            else the model's own, or bfloat16 if that is float32. The fp8 formats take one byte per
            value; their per-tensor scales take no room in the cache. "int8_per_token_head" (or
            "int8") and "fp8_per_token_head" add one float32 scale per token and head, for K and for
            V; "nvfp4" takes half a byte per value and a one-byte scale per 16 values.
        tp: GPUs that share one copy of the model.

    Raises:
        UnsupportedModelError: not every layer caches every token, so there is no single figure per
            token.
        MinivllmError: unknown dtype, or `tp` does not fit the number of KV heads.
    """
    config = as_config(model)
    _refuse_forgetful(config)
    return config.num_hidden_layers * layer_bytes_per_token(config, kv_dtype, tp)


def layer_bytes_per_token(config: ModelConfig, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Return the bytes of one token in one layer that keeps it, on one GPU; see
    `kv_bytes_per_token`.
    """
    kv_dtype = cache_dtype(config, kv_dtype)
    heads = kv_heads_on_rank(config, tp)
    if config.kv_lora_rank is not None:
        if kv_dtype not in DTYPE_BYTES:
            raise MinivllmError(f"a latent cache has no heads, so {kv_dtype!r} does not apply to it")
        return config.latent_width * DTYPE_BYTES[kv_dtype]  # one vector for all heads, and no values
    return 2 * heads * _head_bytes(config.head_dim, kv_dtype)  # keys and values


def kv_cache_tokens(kv_bytes: int, model: Model, block_size: int = 16, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Return how many tokens fit into `kv_bytes` of one GPU, in whole blocks: vLLM's "GPU KV cache
    size".

    Like vLLM, this includes block 0, although that is the null block and never holds a request's
    tokens.
    """
    require(is_number(kv_bytes), f"kv_bytes is {kv_bytes!r}; it must be a number of bytes")
    if kv_bytes < 0:
        raise MinivllmError(f"nothing is left for the KV cache: {kv_bytes / GIB:.2f} GiB")
    block_bytes = kv_bytes_per_token(model, kv_dtype, tp) * positive_count("block_size", block_size)
    return int(kv_bytes // block_bytes) * block_size


def max_concurrency(tokens: int, max_model_len: int) -> float:
    """Return how many requests of maximum length fit at once: vLLM's "Maximum concurrency for N
    tokens per request".
    """
    require(is_number(tokens) and tokens >= 0, f"tokens is {tokens!r}; it must be a number, and not negative")
    return tokens / positive_count("max_model_len", max_model_len)


def kv_heads_on_rank(config: ModelConfig, tp: int) -> int:
    """Return the number of KV heads on each of `tp` GPUs: divided if there are enough, else one
    replicated head each.

    vLLM: `ModelConfig.get_num_kv_heads` in `vllm/config/model.py`.

    Raises:
        MinivllmError: neither `tp` nor the number of KV heads divides the other.
    """
    heads = config.num_key_value_heads
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise MinivllmError(f"the number of tensor-parallel GPUs must be a positive whole number, not {tp!r}")
    if config.kv_lora_rank is None and heads % tp and tp % heads:
        raise MinivllmError(
            f"{heads} key-value heads cannot be divided over {tp} GPUs, nor {tp} GPUs over {heads} heads; "
            f"one must be a multiple of the other"
        )
    return max(1, heads // tp)  # with more GPUs than heads, each has one, replicated


def serving_dtype(model: Model) -> str:
    """Return the dtype in which vLLM runs a model by default: its own, or bfloat16 if that is
    float32.

    vLLM: `_resolve_auto_dtype` in `vllm/config/model.py`.
    """
    dtype = as_config(model).dtype
    return "bfloat16" if dtype == "float32" else dtype


def cache_dtype(model: Model, kv_dtype: str = "auto") -> str:
    """Resolve "auto" to a dtype, and "int8" to "int8_per_token_head"; other known dtypes are
    returned unchanged.

    Raises:
        MinivllmError: unknown dtype.
    """
    config = as_config(model)
    if kv_dtype == "auto":
        kv_dtype = config.checkpoint_kv_dtype or serving_dtype(config)
    if kv_dtype == "int8":  # int8 with one scale per tensor is not worth having
        kv_dtype = "int8_per_token_head"
    if kv_dtype not in KV_DTYPES:
        raise MinivllmError(f"unknown dtype of the KV cache {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
    return kv_dtype


def as_config(model: Model) -> ModelConfig:
    """Return the config itself, or one created from the contents of a `config.json`."""
    return model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)


def _refuse_forgetful(config: ModelConfig) -> None:
    """Raise `UnsupportedModelError` unless every layer caches the key and value of every token."""
    if not config.keeps_every_token:
        window = f"every layer keeps only the last {config.sliding_window} tokens"
        windows = window if config.sliding_window else "some of its layers keep only the tokens inside a window"
        reason = config.cache_exception or windows
        name = config.architecture or config.model_type or "this model"
        raise UnsupportedModelError(
            f"{name}: {reason}, so its cache does not grow by a fixed number of bytes per token; vLLM prints what fits "
            "when it starts"
        )


def _head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Return the bytes of one key (or value) vector: one token, one head."""
    if kv_dtype == "nvfp4":
        if head_dim % 16:
            raise MinivllmError(f"nvfp4 needs a head_dim that is a multiple of 16, not {head_dim}")
        return head_dim // 2 + head_dim // 16  # half a byte a number, and a one-byte scale for 16
    if kv_dtype.endswith("_per_token_head"):
        return head_dim + SCALE_BYTES  # one byte a number
    return head_dim * DTYPE_BYTES[kv_dtype]
