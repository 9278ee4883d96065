"""Parameters of the parts that a multimodal checkpoint has besides its language model: towers and
projectors.

For the families below they are counted from the config; any other part is refused by name, with a
suggestion of what to do instead. The counts are exact for one GPU. On several, the towers' layers
are sharded and the rest is replicated, as in vLLM.
"""

from collections.abc import Callable, Mapping
from typing import Any

from minivllm.config import ModelConfig
from minivllm.errors import UnsupportedModelError

PARTS = ("vision_config", "audio_config", "vision_encoder_config", "audio_encoder_config", "speech_config")
WAY_OUT = "give the size of all weights, or a directory with the checkpoint's safetensors files"


def tower_parameters(config: ModelConfig, tp: int = 1) -> int:
    """Return the number of parameters on one GPU outside the language model; 0 for a text-only
    model.

    Raises:
        UnsupportedModelError: a part is not counted here; the message names it and a way out.
    """
    outer = config.hf_config
    parts = [name for name in PARTS if outer.get(name)]
    if not parts:
        return 0
    family = str(outer.get("model_type"))
    part = outer[parts[0]]
    counter = FAMILIES.get(family)
    kind = str(part.get("model_type") or family) if isinstance(part, Mapping) else "unknown"
    if len(parts) > 1 or counter is None or kind not in TOWERS:
        names = " and ".join(parts)
        raise UnsupportedModelError(
            f"{family}: the parameters of its {names} ({kind}) are not counted here, only its language model's; "
            f"{WAY_OUT}"
        )
    try:
        # Only the layers are divided over the GPUs; everything else is replicated.
        layers, rest, width = TOWERS[kind](part)
        return layers // tp + rest + counter(outer, part, width, config.hidden_size)
    except KeyError as missing:
        said = f"{family}: its {parts[0]} lacks {missing}, so it cannot be counted; {WAY_OUT}"
        raise UnsupportedModelError(said) from None


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _encoder(part: Mapping[str, Any], layers: str = "num_hidden_layers") -> int:
    """Count layers with biases everywhere, two LayerNorms and an MLP of two linears."""
    hidden, mlp = part["hidden_size"], part["intermediate_size"]
    return part[layers] * (4 * _linear(hidden, hidden) + _linear(hidden, mlp) + _linear(mlp, hidden) + 4 * hidden)


def _patches(part: Mapping[str, Any]) -> int:
    return (part["image_size"] // part["patch_size"]) ** 2


def _pixels(part: Mapping[str, Any], frames: int = 1) -> int:
    return part.get("num_channels", part.get("in_channels", part.get("in_chans", 3))) * part["patch_size"] ** 2 * frames


def _clip(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden = part["hidden_size"]
    # Class token, patches, positions and two norms.
    rest = hidden + _pixels(part) * hidden + (_patches(part) + 1) * hidden + 4 * hidden
    return _encoder(part), rest, hidden


def _llama4(part: Mapping[str, Any]) -> tuple[int, int, int]:
    """Count CLIP's layers, and an adapter of two linears without biases."""
    layers, rest, _ = _clip(part)
    adapter = part["intermediate_size"] * part["projector_input_dim"] + part["projector_output_dim"] ** 2
    return layers, rest + adapter, part["vision_output_dim"]


def _siglip(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden = part["hidden_size"]
    rest = _linear(_pixels(part), hidden) + _patches(part) * hidden + 2 * hidden
    if part.get("vision_use_head", True):  # attention with one learned query, a norm and an MLP
        rest += hidden + _encoder({**part, "num_hidden_layers": 1}) - 2 * hidden
    return _encoder(part), rest, hidden


def _pixtral(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden = part["hidden_size"]
    layer = 4 * hidden**2 + 3 * hidden * part["intermediate_size"] + 2 * hidden
    return part["num_hidden_layers"] * layer, _pixels(part) * hidden + hidden, hidden


def _qwen2_vl(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden = part["embed_dim"]
    mlp = int(hidden * part.get("mlp_ratio", 4))
    layers = _encoder({"hidden_size": hidden, "intermediate_size": mlp, "depth": part["depth"]}, "depth")
    return layers, _pixels(part, part.get("temporal_patch_size", 2)) * hidden + 2 * hidden, hidden


def _qwen25_vl(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden, mlp = part["hidden_size"], part["intermediate_size"]
    layer = 4 * _linear(hidden, hidden) + 2 * _linear(hidden, mlp) + _linear(mlp, hidden) + 2 * hidden
    return part["depth"] * layer, _pixels(part, part.get("temporal_patch_size", 2)) * hidden + hidden, hidden


def _qwen3_vl(part: Mapping[str, Any]) -> tuple[int, int, int]:
    hidden = part["hidden_size"]
    merged = hidden * part.get("spatial_merge_size", 2) ** 2  # neighbouring patches are merged to one token
    rest = _linear(_pixels(part, part.get("temporal_patch_size", 2)), hidden)
    rest += part["num_position_embeddings"] * hidden + 2 * hidden
    merger = 2 * merged + _linear(merged, merged) + _linear(merged, part["out_hidden_size"])
    return _encoder(part, "depth"), rest + len(part.get("deepstack_visual_indexes") or ()) * merger, hidden


def _llava(outer: Mapping[str, Any], part: Mapping[str, Any], width: int, text: int) -> int:
    bias = outer.get("multimodal_projector_bias", True)
    return _linear(width, text, bias) + _linear(text, text, bias)


def _mistral3(outer: Mapping[str, Any], part: Mapping[str, Any], width: int, text: int) -> int:
    bias = outer.get("multimodal_projector_bias", False)
    merger = width + width**2 * outer.get("spatial_merge_size", 2) ** 2
    return merger + _linear(width, text, bias) + _linear(text, text, bias)


def _gemma3(outer: Mapping[str, Any], part: Mapping[str, Any], width: int, text: int) -> int:
    return width * text + width


def _llama4_projector(outer: Mapping[str, Any], part: Mapping[str, Any], width: int, text: int) -> int:
    return width * text


def _merger(outer: Mapping[str, Any], part: Mapping[str, Any], width: int, text: int) -> int:
    """Count Qwen's merger: neighbouring patches are concatenated, then go through two linears."""
    merged = width * part.get("spatial_merge_size", 2) ** 2
    return _linear(merged, merged) + _linear(merged, part.get("out_hidden_size") or part["hidden_size"])


# By a part's type: counts the parameters of its layers and of the rest, and returns them and its
# width.
TOWERS: dict[str, Callable[[Mapping[str, Any]], tuple[int, int, int]]] = {
    "clip_vision_model": _clip,
    "llama4_vision_model": _llama4,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
    "qwen2_vl": _qwen2_vl,
    "qwen2_vl_vision": _qwen2_vl,
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), _qwen25_vl),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"), _qwen3_vl),
    **dict.fromkeys(("qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision"), _qwen3_vl),
}

# By a model's type: counts the parameters of its projector.
FAMILIES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], int, int], int]] = {
    "llava": _llava,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
    "llama4": _llama4_projector,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _merger),
}
