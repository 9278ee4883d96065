"""Lesson 05's measurements of an int8 KV cache, and of int8 and int4 weights.

Each `measure_*` function measures, prints its table and returns its figures; its callables are the
lesson's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.config import CacheConfig
from minivllm.entrypoints.llm import LLM
from minivllm.memory import kv_bytes_per_token
from minivllm.models.decoder import Decoder
from minivllm_lab.engines.quality import decoder_loss, read, rounded_weights
from minivllm_lab.engines.recording import bare_engine, record_run
from minivllm_lab.progress import track
from minivllm_lab.tables import table
from minivllm_simulate.known_models import known_model

LLAMA = known_model("Llama-3.1-8B")
OUTLIERS = (1, 50)
"""Factors applied to one channel: unchanged, and an outlier."""
Texts = list[list[int]]
"""Token ids of several texts."""
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows [..., n] to integers and the scale [...] of each row."""


class Rounding(NamedTuple):
    """The lesson's functions that round weights and unpack them."""

    quantize: Quantize
    quantize_int4: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    dequantize_int4: Callable[[Tensor, Tensor, int], Tensor]


# ---- the KV cache in int8 ------------------------------------------------------------------------


def measure_cache(llm: LLM, model: str, texts: Texts, context: int, device: torch.device) -> dict:
    """Measure the engine's int8 cache: bytes per token, loss and agreement on held-out text, and
    the time of a step.
    """
    kinds, config = ("float32", "bfloat16", "fp8", "int8"), llm.llm_engine.model_config
    sizes = {
        kind: {"here": kv_bytes_per_token(config, kind), "llama": kv_bytes_per_token(LLAMA, kind)} for kind in kinds
    }
    fits = {kind: sizes["bfloat16"]["llama"] / sizes[kind]["llama"] for kind in kinds}
    settings = {"device": device.type, "num_gpu_blocks_override": 300, "max_model_len": 1024}
    full, quantized = read(llm, texts), read(LLM(model, kv_cache_dtype="int8", **settings), texts)
    added, agreement = quantized.loss - full.loss, quantized.agreement(full)
    faster = _step_seconds(model, device, context, "auto") / _step_seconds(model, device, context, "int8")
    caption = (
        f"read by the engine: loss {full.loss:.4f}, in int8 {added:+.4f}, same favourite token at {agreement:.1%}; "
        f"a decode step of 8 requests at {context} tokens is {faster:.2f} × as fast"
    )
    rows = [(kind, *(f"{size:,}" for size in sizes[kind].values()), f"{fits[kind]:.2f} ×") for kind in kinds]
    table("Bytes of a token", ("KV cache", "this model", "Llama-3.1-8B", "fits, of bfloat16"), rows, caption)
    loss = {"loss": full.loss, "added": added, "agreement": agreement}
    return {"bytes": sizes, "capacity": fits, **loss, "faster": faster, "context": context}


def _step_seconds(model: str, device: torch.device, context: int, kv_cache_dtype: str) -> float:
    """Return the median seconds of a decode step of 8 requests at `context` tokens."""
    pool = CacheConfig(num_gpu_blocks=1 + 8 * (context // 16 + 2), enable_prefix_caching=False)
    core = bare_engine(model, device, pool, kv_cache_dtype=kv_cache_dtype, max_model_len=context + 32)
    return record_run(core, [(context, 24)] * 8).decode_seconds


# ---- weights in int8 and int4 --------------------------------------------------------------------


def stored(weight: Tensor, group: int | None, rounding: Rounding) -> tuple[Tensor, float]:
    """Round weights [n, k] to int4 groups (None: int8 with a scale per row); return them and the
    bits per weight.

    Scales count as 16 bits.
    """
    columns = weight.shape[1]
    if group is None:
        integers, scales = rounding.quantize(weight)
        return integers * scales[:, None], 8 + 16 / columns
    packed, scales = rounding.quantize_int4(weight, min(group, columns))
    bits = 8 * packed.numel() + 16 * scales.numel()
    return rounding.dequantize_int4(packed, scales, columns), bits / weight.numel()


def measure_weights(model: Decoder, texts: Texts, group: int, rounding: Rounding) -> dict:
    """Measure bits, error and added loss of all layers' weights in int8, and in int4 by group size."""
    groups: dict = {"int8, a scale per row": None, "int4, a scale per row": 1 << 20}
    groups |= {f"int4, groups of {size}": size for size in sorted({16, 128, group}, reverse=True)}
    layer: Any = model.layers[0]
    base, results, rows = decoder_loss(model, texts), {}, []
    for name, size in track(groups.items(), "rounding weights"):
        results[name] = {"bits": stored(layer.mlp.gate_up_proj.weight, size, rounding)[1]}
        for outlier in OUTLIERS:
            with rounded_weights(model, lambda weight, size=size: stored(weight, size, rounding)[0], outlier) as error:
                added = decoder_loss(model, texts) - base
                results[name] |= {f"error_{outlier}": error, f"added_{outlier}": added}
        bits, error, added, _, worse = results[name].values()
        rows.append((name, f"{bits:.2f}", f"{error:.1%}", f"{added:+.4f}", f"{worse:+.4f}"))
    columns = ("stored as", "bits", "error", "loss added", "one channel × 50")
    table(f"Weights of the layers (loss {base:.4f})", columns, rows)
    return {"ways": results, "loss": base}
