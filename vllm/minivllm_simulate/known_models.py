"""The shapes of well-known models, taken from their `config.json`, so that tables and widgets need
no network.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Any

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError


def _decoder(model_type: str, vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any):
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "dtype": "bfloat16",
        **more,
    }


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _gemma3(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int):
    text = _decoder(
        "gemma3_text", 262208, hidden, mlp, layers, heads, kv_heads, head_dim=head_dim, sliding_window=1024,
        max_position_embeddings=131072,
    )  # fmt: skip
    return {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text, "vision_config": SIGLIP}


LLAMA2 = {"dtype": "float16", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
LLAMA3 = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
LLAMA31 = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, **_llama3_rope(8.0)}
LLAMA32 = {**LLAMA31, **_llama3_rope(32.0), "tie_word_embeddings": True}
QWEN25 = {"max_position_embeddings": 32768, "rope_theta": 1e6, "use_sliding_window": False}
QWEN25_LONG = {**QWEN25, "max_position_embeddings": 131072}
QWEN3 = {"max_position_embeddings": 40960, "rope_theta": 1e6, "head_dim": 128, "use_sliding_window": False}
TIED = {"tie_word_embeddings": True}
GPT_OSS = {
    "head_dim": 64, "num_experts_per_tok": 4, "max_position_embeddings": 131072, "sliding_window": 128,
    "attention_bias": True, "rope_theta": 150000.0, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

# fmt: off
CONFIGS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({
    "openai-community/gpt2": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    },
    "facebook/opt-13b": {
        "model_type": "opt", "vocab_size": 50272, "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40,
        "num_attention_heads": 40, "max_position_embeddings": 2048, "word_embed_proj_dim": 5120, "dtype": "float16",
    },
    "meta-llama/Llama-2-7b-hf": _decoder("llama", 32000, 4096, 11008, 32, 32, 32, **LLAMA2),
    "meta-llama/Llama-2-13b-hf": _decoder("llama", 32000, 5120, 13824, 40, 40, 40, **LLAMA2),
    "meta-llama/Meta-Llama-3-8B": _decoder("llama", 128256, 4096, 14336, 32, 32, 8, **LLAMA3),
    "meta-llama/Meta-Llama-3-70B": _decoder("llama", 128256, 8192, 28672, 80, 64, 8, **LLAMA3),
    "meta-llama/Llama-3.1-8B": _decoder("llama", 128256, 4096, 14336, 32, 32, 8, **LLAMA31),
    "meta-llama/Llama-3.1-70B": _decoder("llama", 128256, 8192, 28672, 80, 64, 8, **LLAMA31),
    "meta-llama/Llama-3.2-1B": _decoder("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, **LLAMA32),
    "meta-llama/Llama-3.2-3B": _decoder("llama", 128256, 3072, 8192, 28, 24, 8, head_dim=128, **LLAMA32),
    "mistralai/Mistral-7B-v0.3": _decoder(
        "mistral", 32768, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6,
        sliding_window=None,
    ),
    "mistralai/Mixtral-8x7B-v0.1": _decoder(
        "mixtral", 32000, 4096, 14336, 32, 32, 8, max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=1e6,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "Qwen/Qwen2.5-0.5B": _decoder("qwen2", 151936, 896, 4864, 24, 14, 2, **QWEN25, **TIED),
    "Qwen/Qwen2.5-1.5B": _decoder("qwen2", 151936, 1536, 8960, 28, 12, 2, **QWEN25, **TIED),
    "Qwen/Qwen2.5-7B": _decoder("qwen2", 152064, 3584, 18944, 28, 28, 4, **QWEN25_LONG),
    "Qwen/Qwen2.5-14B": _decoder("qwen2", 152064, 5120, 13824, 48, 40, 8, **QWEN25_LONG),
    "Qwen/Qwen3-0.6B": _decoder("qwen3", 151936, 1024, 3072, 28, 16, 8, **QWEN3, **TIED),
    "Qwen/Qwen3-8B": _decoder("qwen3", 151936, 4096, 12288, 36, 32, 8, **QWEN3),
    "Qwen/Qwen3-14B": _decoder("qwen3", 151936, 5120, 17408, 40, 40, 8, **QWEN3),
    "Qwen/Qwen3-32B": _decoder("qwen3", 151936, 5120, 25600, 64, 64, 8, **QWEN3),
    "Qwen/Qwen3-30B-A3B": _decoder(
        "qwen3_moe", 151936, 2048, 6144, 48, 32, 4, **QWEN3, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": _decoder(
        "deepseek_v2", 102400, 2048, 10944, 27, 16, 16, **LATENT, max_position_embeddings=163840, n_routed_experts=64,
        num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
    ),
    "deepseek-ai/DeepSeek-V3": _decoder(
        "deepseek_v3", 129280, 7168, 18432, 61, 128, 128, **LATENT, max_position_embeddings=163840, q_lora_rank=1536,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1,
        first_k_dense_replace=3, **FP8_BLOCKS,
    ),
})
"""Models whose layers all keep every token: their cache takes a fixed number of bytes per token."""

HYBRIDS: MappingProxyType[str, dict[str, Any]] = MappingProxyType({
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _decoder(
        "qwen3_next", 151936, 2048, 5120, 48, 16, 2, head_dim=256, max_position_embeddings=262144, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "openai/gpt-oss-20b": _decoder("gpt_oss", 201088, 2880, 2880, 24, 64, 8, num_local_experts=32, **GPT_OSS),
    "openai/gpt-oss-120b": _decoder("gpt_oss", 201088, 2880, 2880, 36, 64, 8, num_local_experts=128, **GPT_OSS),
    "google/gemma-3-4b-it": _gemma3(2560, 10240, 34, 8, 4, 256),
    "google/gemma-3-12b-it": _gemma3(3840, 15360, 48, 16, 8, 256),
    "google/gemma-3-27b-it": _gemma3(5376, 21504, 62, 32, 16, 128),
})
"""Models whose layers differ in what they keep of a request (`memory.kv_layers`)."""
# fmt: on


def known_model(name: str) -> ModelConfig:
    """Return the shape of a known model by its name on the hub, with or without the owner, in any
    case.

    Raises:
        MinivllmError: the model is not in the list; the message gives the list.
    """
    wanted = str(name).lower()
    for full_name, config in (CONFIGS | HYBRIDS).items():
        if wanted in (full_name.lower(), full_name.split("/")[1].lower()):
            return ModelConfig.from_dict(config)
    short_names = ", ".join(full_name.split("/")[1] for full_name in (*CONFIGS, *HYBRIDS))
    raise MinivllmError(f"no known shape for the model {name!r}; known: {short_names}")


def find_model(name: str) -> ModelConfig:
    """Return a local model, a well-known one, or one from the hub, in this order.

    Raises:
        MinivllmError: no such model exists.
    """
    if not Path(name).expanduser().exists():
        try:
            return known_model(name)
        except MinivllmError:
            if "/" not in name:
                raise
    return ModelConfig.from_pretrained(name)
