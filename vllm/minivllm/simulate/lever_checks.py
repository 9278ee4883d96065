"""The error of the lever model against published measurements, none of which was used to calibrate it.

    for check in published_checks(): print(check.what, check.measured, check.modelled)

Print `median_error()` beside whatever `minivllm.simulate.levers` predicts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

from minivllm.simulate.cost_model import StepShape
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.levers import LeverCost, Levers, LeverWorkload, throughput
from minivllm.simulate.virtual_clock import SimulatedRequest

SERVING = Levers(
    kv_cache=True,
    paging=True,
    continuous_batching=True,
    flash_attention=True,
    gqa=True,
    chunked_prefill=True,
    cuda_graphs=True,
)
GPT_FAST = "gpt-fast, README: batch 1, short context, A100-80 at 330 W"
FP8_BLOG = "vLLM blog of 2026-04-22: Llama-3.1-8B on an H100"


@dataclass(frozen=True)
class PublishedCheck:
    """One published figure and the model's: a rate, a time, or a ratio of two of them."""

    what: str
    source: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """(modelled − measured) / measured."""
        return self.modelled / self.measured - 1


@cache
def published_checks() -> tuple[PublishedCheck, ...]:
    """All checks."""
    alone = _decode_rate("Llama-3.1-8B", "A100")
    scaling = [
        PublishedCheck(
            f"Llama-3.1-8B, {tp} GPUs against one",
            GPT_FAST,
            rate / 93.83,
            _decode_rate("Llama-3.1-8B", "A100", tensor_parallel=tp) / alone,
        )
        for tp, rate in ((2, 149.10), (4, 217.21), (8, 276.01))
    ]
    int8 = _decode_rate("Llama-3.1-8B", "A100", weight_bits=8) / alone
    eager = _decode_rate("Llama-2-7b-hf", "A100", cuda_graphs=False)
    fp8 = _slope(kv_dtype="fp8") / _slope()
    return (
        PublishedCheck("Llama-3.1-8B, tokens/s", GPT_FAST, 93.83, alone),
        PublishedCheck("Llama-2-7B, tokens/s", GPT_FAST, 104.9, _decode_rate("Llama-2-7b-hf", "A100")),
        *scaling,
        PublishedCheck("Llama-3.1-8B, int8 weights against 16 bits", GPT_FAST, 137.64 / 93.89, int8),
        PublishedCheck(
            "Llama-2-7B, graphs against eager",
            "vllm-project/vllm#1440: batch 1, A100",
            1.20 / 1.05,
            _decode_rate("Llama-2-7b-hf", "A100") / eager,
        ),
        PublishedCheck("fp8 cache: time per token of context against 16 bits", FP8_BLOG, 2.37 / 4.37, fp8),
        PublishedCheck(
            "fp8 cache: throughput, 8 at once, 20,000 tokens in and 2,000 out",
            FP8_BLOG,
            517.5 / 450.3,
            _long_contexts("fp8") / _long_contexts("auto"),
        ),
    )


def median_error() -> float:
    """Median of |modelled − measured| / measured."""
    return statistics.median(abs(check.error) for check in published_checks())


def _decode_rate(model: str, gpu: str, **levers: object) -> float:
    """Tokens per second of one request whose context is short."""
    return 1 / _cost(model, gpu, **levers).seconds(StepShape.of([(1, 50)]))


def _slope(**levers: object) -> float:
    """Seconds that a token of context adds to a decode of Llama-3.1-8B on an H100."""
    cost = _cost("Llama-3.1-8B", "H100", **levers)
    near, far = (cost.seconds(StepShape.of([(1, context)])) for context in (0, 100_000))
    return (far - near) / 100_000


def _long_contexts(kv_dtype: str) -> float:
    work = LeverWorkload("long", "", (SimulatedRequest(20_000, 2_000),) * 24, max_model_len=32_768, max_num_seqs=8)
    levers = replace(SERVING, kv_dtype=kv_dtype)
    return throughput(levers, known_model("Llama-3.1-8B"), get_hardware("H100"), work).tokens_per_second


def _cost(model: str, gpu: str, **levers: object) -> LeverCost:
    return LeverCost.of(replace(SERVING, **levers), known_model(model), get_hardware(gpu))  # pyright: ignore
