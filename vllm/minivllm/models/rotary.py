"""Rotary position embedding: each pair of a head's elements is rotated by an angle that grows with
the position.

Element `i` is paired with element `i + head_dim/2`, and the pair is rotated by `position *
frequency[i]`. The scaling variants change the frequencies, so that a model trained on short
contexts can distinguish positions in long ones.

Papers: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071. In vLLM:
`vllm/model_executor/layers/rotary_embedding/`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.platforms.device_memory import refuse_beyond_memory


class RotaryTable(nn.Module):
    """A module that holds `table` `[positions, rotary_dim]`: each row is a position's cosines, then
    its sines.

    `minivllm.kernels.elementwise.rotate_heads` applies it to heads.
    """

    table: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        frequencies, scale = rotary_frequencies(config)
        length = table_length(config)
        device = torch.get_default_device()
        if device.type == "meta":  # to compute there, torch would load its compiler, which takes a second
            table = torch.empty(length, config.rotary_dim)
        else:
            # While the table is built, angles, sines and cosines take memory too.
            what = f"the table of rotary positions for max_position_embeddings = {config.max_position_embeddings}"
            num_bytes = 3 * length * config.rotary_dim * torch.float32.itemsize
            refuse_beyond_memory(num_bytes, device, what, "lower it, or the factor of its rope scaling, in config.json")
            # [positions, pairs]
            angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies.to(device)
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)


def table_length(config: ModelConfig) -> int:
    """Return the number of positions in the table: the config's maximum, or the scaled context
    length if longer.
    """
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        stretched = config.max_position_embeddings * scaling["factor"]
    else:
        # 0 without scaling.
        stretched = (scaling.get("original_max_position_embeddings") or 0) * (scaling.get("factor") or 1)
    config.require("max_position_embeddings")
    return max(config.max_position_embeddings, int(stretched))


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Return each pair's angle per position, float32 `[rotary_dim / 2]`, and the scale of cosines
    and sines.

    Raises:
        UnsupportedModelError: the scaling is partial, or none of linear, llama3 and yarn.
        MinivllmError: the scaling lacks one of its parameters; the message names it.
    """
    width = config.rotary_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width  # [pairs]
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    kind = scaling["rope_type"]
    if kind not in ("linear", "llama3", "yarn") or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"the rope scaling {scaling} is not supported; use linear, llama3 or yarn, over whole heads"
        )
    if kind == "linear":
        return frequencies / _parameter(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, config)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Scale as Llama 3.1 does: divide low frequencies by `factor`, keep high ones, interpolate
    those in between.
    """
    factor, low, high = (_parameter(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise MinivllmError(
            f"the model config's rope scaling has high_freq_factor {high} and low_freq_factor {low}; the first must be "
            "above the second, since frequencies between them are blended"
        )
    # How often each pair turns over the original context: few turns are stretched, many are kept.
    turns = _parameter(scaling, "original_max_position_embeddings") * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: keep the frequency, 0: divide it
    return frequencies * (kept + (1 - kept) / factor)


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """Scale as YaRN does: like `_llama3`, with a linear ramp over pair indices and slightly
    sharper attention.
    """
    if config.rope_theta <= 1.0:
        raise MinivllmError(f"the model config's rope_theta is {config.rope_theta}; yarn needs a value above 1")
    original = _parameter(scaling, "original_max_position_embeddings")
    factor = scaling.get("factor") or config.max_position_embeddings / original
    first, last = (
        config.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotary_dim - 1)
    # Their indices, from fast to slow.
    pairs = torch.arange(len(frequencies), dtype=torch.float32, device="cpu")
    slowed = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)  # 0: keep the frequency, 1: divide it
    return frequencies * (1 - slowed + slowed / factor), _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return sharpening(factor, numerator) / sharpening(factor, denominator)
    return sharpening(factor, 1.0)


def sharpening(factor: float, weight: float) -> float:
    """Return the factor by which YaRN sharpens attention for a context `factor` times as long; it
    is 1 for a `weight` of 0.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _parameter(scaling: Mapping[str, Any], name: str) -> float:
    if not scaling.get(name):
        raise MinivllmError(f"the model config's rope scaling {scaling.get('rope_type')!r} lacks {name!r}")
    return scaling[name]
