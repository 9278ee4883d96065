"""Parameter counts of a model, part by part, and the size of its weights.

Parameters are counted as vLLM stores them on one GPU of a tensor-parallel group: projections are
sharded, norms are replicated, and each GPU has at least one KV head.
"""

from collections.abc import Callable

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.memory.bytes_per_token import DTYPE_BYTES, Model, as_config, kv_heads_on_rank, serving_dtype
from minivllm_simulate.memory.layer_kinds import LINEAR, counted_layer_types

PARTS = ("vision_config", "audio_config", "vision_encoder_config", "audio_encoder_config", "speech_config")
"""The parts of a multimodal checkpoint besides its language model."""
WAY_OUT = "give the size of all weights, or a directory with the checkpoint's safetensors files"


def parameter_groups(config: ModelConfig, tp: int = 1) -> dict[str, int]:
    """Return the number of parameters on one GPU by purpose: embedding, attention, mlp (or
    experts), norm, head, vision.

    Exact for `tp=1`. Tied embeddings are counted once. Buffers (RoPE tables) are not parameters.

    Args:
        config: the model's shape.
        tp: GPUs that share one copy of the model.

    Raises:
        UnsupportedModelError: the structure of this model type is not known here.
        MinivllmError: the config lacks a field, or the heads cannot be divided over `tp` GPUs.
    """
    counter = COUNTERS.get(config.model_type)
    if counter is None:
        known = ", ".join(sorted(filter(None, COUNTERS)))
        raise UnsupportedModelError(
            f"the parameters of a {config.model_type!r} model are not counted here (known: {known}); {WAY_OUT}"
        )
    config.require("vocab_size", "hidden_size", "moe_intermediate_size" if config.num_experts else "intermediate_size")
    kv_heads_on_rank(config, tp)
    if config.num_attention_heads % tp:
        raise MinivllmError(f"{config.num_attention_heads} attention heads cannot be divided over {tp} GPUs")
    groups = counter(config, tp)
    if any(config.hf_config.get(part) for part in PARTS):
        groups["vision"] = _vision_parameters(config, tp)
    return groups


def num_parameters(model: Model) -> int:
    """Return the number of parameters of the whole model: every weight, bias and norm; tied
    embeddings count once.
    """
    return sum(parameter_groups(as_config(model)).values())


def routed_parameters(model: Model, tp: int = 1) -> int:
    """Return the number of parameters in the experts that routers choose from, over all layers;
    shared experts are not counted.
    """
    config = as_config(model)
    return _sparse_layers(config) * config.num_experts * _expert(config, tp)


def weight_bytes(model: Model, dtype: str = "auto", tp: int = 1) -> int:
    """Return the size of the weights on one of `tp` GPUs in bytes, with every parameter in `dtype`.

    A quantized checkpoint keeps some parts in 16 bits and adds scales, so its size does not follow
    from the shape. Those of DeepSeek V3 (fp8 in blocks) and gpt-oss (experts in MXFP4) are known,
    with all but the large matrices in 16 bits. What is not counted is read from the checkpoint, if
    that is a local directory and one GPU holds it whole.

    Raises:
        UnsupportedModelError: the structure of this model type, or of a part of it, is not known
            here.
        MinivllmError: unknown dtype, "auto" for another quantized checkpoint, a missing field, or
            indivisible heads.
    """
    config = as_config(model)
    try:
        return _counted_bytes(config, dtype, tp)
    except MinivllmError:
        if dtype != "auto" or tp != 1 or not config.checkpoint_bytes:
            raise
        return config.checkpoint_bytes  # what cannot be counted is read from the files


def _counted_bytes(config: ModelConfig, dtype: str, tp: int) -> int:
    if dtype == "auto":
        if _in_fp8_blocks(config):
            return _bytes_in_fp8_blocks(config, tp)
        if config.quantization == "mxfp4" and config.model_type == "gpt_oss":
            return _bytes_in_mxfp4(config, tp)
        if config.quantization:
            raise MinivllmError(
                f"the size of a checkpoint quantized with {config.quantization!r} does not follow from its shape; "
                f"give a dtype, or the size itself"
            )
        dtype = serving_dtype(config)
    return sum(parameter_groups(config, tp).values()) * bytes_of_dtype(dtype)


def _bytes_in_mxfp4(config: ModelConfig, tp: int) -> int:
    """Return the size in bytes if the experts' matrices take 4 bits per number and a one-byte scale
    per 32, and everything else takes 16 bits.

    This is the size of the checkpoint. On a GPU, the kernel's padding adds to it: gpt-oss-120b
    takes 64.4 to 66.0 GiB instead of 60.8.
    """
    # Gate, up and down of every expert.
    matrices = config.num_hidden_layers * config.num_experts * 3 * config.hidden_size
    matrices *= _share(config.moe_intermediate_size, tp)
    return (sum(parameter_groups(config, tp).values()) - matrices) * 2 + matrices * 17 // 32


def _in_fp8_blocks(config: ModelConfig) -> bool:
    blocks = (config.quantization_config or {}).get("weight_block_size")
    return config.quantization == "fp8" and blocks == [128, 128] and COUNTERS.get(config.model_type) is _latent_decoder


def _bytes_in_fp8_blocks(config: ModelConfig, tp: int) -> int:
    """Return the size in bytes if matrices are fp8, with one float32 scale per 128 x 128 numbers.

    Embedding, head, norms and routers stay in 16 bits (DeepSeek-V3's README_WEIGHTS.md, and the
    tensors of its checkpoint). A partial block at a matrix's edge counts proportionally, which is
    off by less than 0.001 %.
    """
    groups = parameter_groups(config, tp)
    # Two norms a layer, counted with attention.
    latent_norms = (config.q_lora_rank or 0) + (config.kv_lora_rank or 0)
    routers = _sparse_layers(config) * _router(config)
    wide = groups["embedding"] + groups["norm"] + groups["head"] + config.num_hidden_layers * latent_norms + routers
    narrow = sum(groups.values()) - wide
    return narrow + narrow // 128**2 * 4 + wide * 2


def rotary_table_bytes(model: Model, dtype: str = "auto") -> int:
    """Return the size of the RoPE table in bytes: cosines and sines, one row per position, loaded
    along with the weights.

    It is replicated on every GPU. Weights and table together are vLLM's "Model loading took N GiB".
    """
    config = as_config(model)
    if config.model_type in ("gpt2", "opt"):
        return 0  # learned positions are parameters
    return (
        config.max_position_embeddings
        * config.rotary_dim
        * bytes_of_dtype(serving_dtype(config) if dtype == "auto" else dtype)
    )


def _gated_decoder(config: ModelConfig, tp: int) -> dict[str, int]:
    """Count the parameters of a Llama-family decoder: RMSNorm, RoPE, grouped-query attention, and a
    gated MLP or experts.
    """
    vocab = _share(config.vocab_size, tp)
    hidden = config.hidden_size
    norms = 4 if config.model_type in ("gemma2", "gemma3_text") else 2
    return {
        "embedding": vocab * hidden,
        "attention": config.num_hidden_layers * _grouped_attention(config, tp),
        **_mlp_layers(config, tp),
        "norm": (norms * config.num_hidden_layers + 1) * hidden,
        "head": 0 if config.tie_word_embeddings else vocab * hidden,
    }


def _grouped_attention(config: ModelConfig, tp: int) -> int:
    hidden, width = config.hidden_size, config.head_dim
    q = config.num_attention_heads // tp * width
    kv = kv_heads_on_rank(config, tp) * width
    projections = hidden * (q + 2 * kv) + q * hidden  # into q, k and v, and out of the heads
    biases = (q + 2 * kv) * config.attention_bias + hidden * config.attention_output_bias
    return projections + biases + 2 * width * config.qk_norm


def _mlp_layers(config: ModelConfig, tp: int) -> dict[str, int]:
    hidden, experts = config.hidden_size, config.num_experts
    dense = 3 * hidden * _share(config.intermediate_size, tp)
    # Biases of gate and up, and of down.
    dense += (2 * _share(config.intermediate_size, tp) + hidden) * config.mlp_bias
    if not experts:
        return {"mlp": config.num_hidden_layers * dense}
    sparse = (experts + config.num_shared_experts) * _expert(config, tp) + _router(config)
    return {"mlp": config.num_dense_layers * dense, "experts": _sparse_layers(config) * sparse}


def _sparse_layers(config: ModelConfig) -> int:
    return config.num_hidden_layers - config.num_dense_layers


def _expert(config: ModelConfig, tp: int) -> int:
    mlp = _share(config.moe_intermediate_size, tp)
    biases = 2 * mlp + config.hidden_size if config.model_type == "gpt_oss" else 0
    return 3 * config.hidden_size * mlp + biases


def _router(config: ModelConfig) -> int:
    bias = config.num_experts if config.model_type in WITH_ROUTER_BIAS else 0
    return config.num_experts * config.hidden_size + bias


def _latent_decoder(config: ModelConfig, tp: int) -> dict[str, int]:
    """Count DeepSeek V2 and V3: multi-head latent attention. The two down-projections to latents
    are replicated.
    """
    config.require("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert config.kv_lora_rank is not None
    assert config.qk_rope_head_dim is not None
    hidden, heads = config.hidden_size, config.num_attention_heads // tp
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    rank = config.q_lora_rank
    # Through a latent of its own, with a norm, or directly.
    into_query = hidden * rank + rank + rank * query if rank else hidden * query
    into_latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
    out_of_latent = config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    output = heads * config.v_head_dim * hidden
    attention = into_query + into_latent + out_of_latent + output
    return {**_gated_decoder(config, tp), "attention": config.num_hidden_layers * attention}


def _gpt_oss(config: ModelConfig, tp: int) -> dict[str, int]:
    """Count gpt-oss: biases everywhere, including experts and routers, and a sink for each head."""
    groups = _gated_decoder(config, tp)
    layers = config.num_hidden_layers
    groups["attention"] += layers * (config.num_attention_heads // tp)
    return groups


def _gated_delta(config: ModelConfig, tp: int) -> dict[str, int]:
    """Count Qwen3-Next and Qwen3.5: most layers are gated delta nets, and the others gate their
    attention's output.
    """
    hf, hidden, layers = config.hf_text_config, config.hidden_size, config.num_hidden_layers
    groups = _gated_decoder(config, tp)
    # Layers that are gated delta nets.
    linear = (counted_layer_types(config) or ()).count(LINEAR)
    gate = hidden * config.num_attention_heads // tp * config.head_dim  # attention's output gate
    full = _grouped_attention(config, tp) + gate + 2 * config.head_dim
    heads = hf["linear_num_value_heads"] // tp
    keys = hf["linear_num_key_heads"] // tp * hf["linear_key_head_dim"]
    values = heads * hf["linear_value_head_dim"]
    net = hidden * (2 * keys + 3 * values + 2 * heads) + (2 * keys + values) * hf["linear_conv_kernel_dim"]
    groups["attention"] = (layers - linear) * full + linear * (net + 2 * heads + hf["linear_value_head_dim"])
    if config.num_experts:
        shared = 3 * hidden * _share(hf["shared_expert_intermediate_size"], tp) + hidden
        groups["experts"] += layers * shared
    return groups


def _gpt(config: ModelConfig, tp: int) -> dict[str, int]:
    """Count GPT-2 and OPT: LayerNorm with bias, attention and a two-layer MLP with biases, learned
    positions (in OPT two more than its config says) and a tied head.
    """
    config.require("max_position_embeddings")
    positions = config.max_position_embeddings + 2 * (config.model_type == "opt")
    hidden, mlp = config.hidden_size, _share(config.intermediate_size, tp)
    heads = config.num_attention_heads // tp * config.head_dim
    attention = 3 * (hidden * heads + heads) + heads * hidden + hidden
    return {
        "embedding": _share(config.vocab_size, tp) * hidden + positions * hidden,
        "attention": config.num_hidden_layers * attention,
        "mlp": config.num_hidden_layers * (2 * hidden * mlp + mlp + hidden),
        "norm": (2 * config.num_hidden_layers + 1) * 2 * hidden,
        "head": 0,
    }


def _vision_parameters(config: ModelConfig, tp: int) -> int:
    """Count Gemma 3's vision tower (SigLIP) and projector. As in vLLM, only the tower's layers are
    sharded.
    """
    outer = config.hf_config
    parts = {name: outer[name] for name in PARTS if outer.get(name)}
    kind = parts.get("vision_config", {}).get("model_type")
    if list(parts) != ["vision_config"] or (outer.get("model_type"), kind) != ("gemma3", "siglip_vision_model"):
        raise UnsupportedModelError(
            f"{outer.get('model_type')}: the parameters of its {' and '.join(parts)} are not counted here, only its "
            f"language model's and Gemma 3's; {WAY_OUT}"
        )
    tower = parts["vision_config"]
    hidden, mlp, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    # Four projections of attention, two of the MLP and two LayerNorms, all with biases.
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * mlp + (mlp + 1) * hidden + 4 * hidden
    # Each patch of three colours becomes a vector; every position has one; a norm ends the tower.
    num_patches = (tower["image_size"] // patch) ** 2
    embeddings = (3 * patch**2 + 1) * hidden + num_patches * hidden + 2 * hidden
    projector = hidden * config.hidden_size + hidden
    return tower["num_hidden_layers"] * layer // tp + embeddings + projector


def bytes_of_dtype(dtype: str) -> int:
    """Return the bytes per weight. Raise `MinivllmError` for an unknown dtype."""
    if dtype not in tuple(DTYPE_BYTES):
        raise MinivllmError(f"unknown dtype of weights {dtype!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _share(width: int, tp: int) -> int:
    return -(-width // tp)  # rounded up: the last part is padded


WITH_ROUTER_BIAS = ("deepseek_v3", "gpt_oss", "kimi_k2")
COUNTERS: dict[str, Callable[[ModelConfig, int], dict[str, int]]] = {
    **dict.fromkeys(("", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"), _gated_decoder),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _latent_decoder),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gated_decoder),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta),
    "gpt_oss": _gpt_oss,
    "opt": _gpt,
    "gpt2": _gpt,
}
