"""The error of the lever model against published measurements, none of which was used to calibrate
it.

    for check in published_checks(): print(check.what, check.measured, check.modelled)

There are three kinds of checks: decodes, prefills of a thousand tokens and more, and short prefills
of 128. The error on decodes says nothing about prefills, so `levers` has one constant for decodes
and one for both. Short prefills are modelled too fast by half, because the engines of 2023 also
spent a fixed time on each.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import cache

from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import SERVING, LeverCost, LeverWorkload, throughput
from minivllm_simulate.published import (
    SARATHI,
    SARATHI_STEP,
    SPLITWISE,
    SPLITWISE_FIRST_TOKENS,
    PublishedCheck,
    sarathi_step,
    splitwise_cost,
)
from minivllm_simulate.virtual_clock import SimulatedRequest

GPT_FAST = "gpt-fast, README: batch 1, short context, A100-80 at 330 W"
FP8_BLOG = "vLLM blog of 2026-04-22: Llama-3.1-8B on an H100"
TENSORRT = "TensorRT-LLM v0.6.1, docs/source/performance.md, low latency: batch 1, A100, fp16"
LMDEPLOY = "LMDeploy v0.1.0a1, docs/en/benchmark/a100_fp16.md, static inference: batch 1, A100-80, fp16"
FIRST_TOKENS = (
    (TENSORRT, "Llama-2-7b-hf", 1, 128, 0.016),
    (TENSORRT, "Llama-2-7b-hf", 1, 2048, 0.133),
    (TENSORRT, "Meta-Llama-3-70B", 4, 128, 0.047),
    (TENSORRT, "Meta-Llama-3-70B", 4, 2048, 0.377),
    (LMDEPLOY, "Llama-2-7b-hf", 1, 128, 0.022),
    (LMDEPLOY, "Llama-2-7b-hf", 1, 2048, 0.139),
    (LMDEPLOY, "Llama-2-13b-hf", 1, 128, 0.040),
    (LMDEPLOY, "Llama-2-13b-hf", 1, 2048, 0.242),
    (LMDEPLOY, "Meta-Llama-3-70B", 4, 128, 0.074),
    (LMDEPLOY, "Meta-Llama-3-70B", 4, 2048, 0.402),
)
"""Source, model, GPUs, tokens of the prompt, seconds to the first token. Their 70B is Llama 2's,
whose layers are those of Llama 3's.
"""
SHORT = 1000
"""Prompts of fewer tokens are short."""


@cache
def published_checks() -> tuple[PublishedCheck, ...]:
    """Return all checks."""
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
        *_first_tokens(),
    )


def checks_of(kind: str) -> list[PublishedCheck]:
    """Return the checks of one kind, "decode", "prefill" or "short prefill"."""
    return [check for check in published_checks() if check.kind == kind]


def median_error(kind: str) -> float:
    """Return the median of |modelled − measured| / measured over the checks of one kind."""
    return statistics.median(abs(check.error) for check in checks_of(kind))


def _first_tokens() -> list[PublishedCheck]:
    """Check times to first token, for prompts computed alone or beside decodes, and steps with a
    chunk.
    """
    checks = [
        PublishedCheck(
            f"{model}{f' on {tp} GPUs' if tp > 1 else ''}: first token after {prompt:,}, seconds",
            source,
            published,
            _cost(model, "A100-80", tensor_parallel=tp).seconds(StepShape.of([(prompt, 0)])),
            kind="prefill" if prompt >= SHORT else "short prefill",
        )
        for source, model, tp, prompt, published in FIRST_TOKENS
    ]
    checks += [
        PublishedCheck(
            f"{trace}: first token after {prompt:,} on {gpu}, seconds",
            SPLITWISE,
            published,
            splitwise_cost(gpu).seconds(StepShape.of([(prompt, 0)])),
            kind="prefill",
        )
        for (trace, prompt), by_gpu in SPLITWISE_FIRST_TOKENS.items()
        for gpu, published in by_gpu.items()
    ]
    checks += [
        PublishedCheck(
            f"Yi-34B on 2 GPUs: step of {SARATHI_STEP:,} after {context:,}, seconds",
            "Sarathi-Serve, table 4: 99 % of the times between tokens",
            published,
            sarathi_step(context),
            kind="prefill",
        )
        for context, published in SARATHI.values()
    ]
    cost, decodes = _cost("Llama-3.1-8B", "H100"), [(1, 21_000)] * 7
    chunks = ((8185, 0), (8185, 8185), (3630, 16_370))
    seconds = sum(cost.seconds(StepShape.of([chunk, *decodes])) for chunk in chunks)
    label = "Llama-3.1-8B: first token after 20,000, beside 7 decodes, seconds"
    return [*checks, PublishedCheck(label, FP8_BLOG, 0.7636, seconds, kind="prefill")]


def _decode_rate(model: str, gpu: str, **levers: object) -> float:
    """Return the tokens per second of one request with a short context."""
    return 1 / _cost(model, gpu, **levers).seconds(StepShape.of([(1, 50)]))


def _slope(**levers: object) -> float:
    """Return the seconds that a token of context adds to a decode of Llama-3.1-8B on an H100."""
    cost = _cost("Llama-3.1-8B", "H100", **levers)
    near, far = (cost.seconds(StepShape.of([(1, context)])) for context in (0, 100_000))
    return (far - near) / 100_000


def _long_contexts(kv_dtype: str) -> float:
    work = LeverWorkload("long", "", (SimulatedRequest(20_000, 2_000),) * 24, max_model_len=32_768, max_num_seqs=8)
    levers = replace(SERVING, kv_dtype=kv_dtype)
    return throughput(levers, known_model("Llama-3.1-8B"), get_hardware("H100"), work).tokens_per_second


def _cost(model: str, gpu: str, **levers: object) -> LeverCost:
    return LeverCost.of(replace(SERVING, **levers), known_model(model), get_hardware(gpu))  # pyright: ignore
