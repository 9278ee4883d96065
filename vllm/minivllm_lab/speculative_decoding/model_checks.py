"""The error of the speculation model against published measurements that were not used to calibrate
it.

    for check in speculation_checks(): print(check.what, check.measured, check.modelled)

All measurements are of single requests on an H100 (the first source names no GPU; its rate without
drafts is an H100's): no series over batch sizes was found that also gives the acceptance length.
"""

from __future__ import annotations

import statistics
from functools import cache

from minivllm_lab.speculative_decoding.speculation import Drafter, Speculation, eagle_head, head_cost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.published import PublishedCheck

EAGLE3_VLLM = "vllm-project/vllm#20780: Llama-3.1-8B, MT-bench, batch 1"
EAGLE1_VLLM = "vllm-project/vllm#16035: Llama-3-8B, MT-bench, batch 1"
SGLANG = "sgl-project/sglang#4247: Llama-3.1-8B, batch 1"
PLAIN_TPOT = 7.07
EAGLE3_SERIES = {2: (2.36, 4.32), 3: (2.79, 4.09), 4: (3.08, 4.05), 5: (3.32, 4.13), 6: (3.46, 4.20), 7: (3.54, 4.29)}
"""Drafts -> acceptance length, and TPOT in ms."""
CONTEXT = 256
"""Tokens of a conversation there, about; the number hardly matters."""


@cache
def speculation_checks() -> tuple[PublishedCheck, ...]:
    """Return all checks."""
    head = _on_h100(eagle_head(known_model("Llama-3.1-8B"), get_hardware("H100")))
    first = _on_h100(eagle1_head())
    eagle3 = [
        PublishedCheck(f"EAGLE-3, {k} drafts: speed-up", EAGLE3_VLLM, PLAIN_TPOT / tpot, _speedup(head, k, length))
        for k, (length, tpot) in EAGLE3_SERIES.items()
    ]
    eagle1 = [
        PublishedCheck(f"EAGLE-1, {k} drafts: speed-up", EAGLE1_VLLM, rate / 128.64, _speedup(first, k, length))
        for k, length, rate in ((2, 1.89, 175.49), (4, 2.08, 165.65))
    ]
    # The trees that were verified are of one size, so the steps differ by the drafter's passes.
    passes = (5.39 / 378.57 - 4.68 / 361.70) / 3
    return (
        *eagle3,
        *eagle1,
        PublishedCheck("EAGLE-3: seconds of a drafter's pass", SGLANG, passes, head.drafter.seconds(1, 1, CONTEXT)),
    )


def speculation_error() -> float:
    """Return the median of |modelled − measured| / measured over all checks."""
    return statistics.median(abs(check.error) for check in speculation_checks())


def eagle1_head() -> Drafter:
    """Return the EAGLE-1 head of Llama-3.1-8B: a layer that takes two vectors, and an output layer
    like the target's.
    """
    model = known_model("Llama-3.1-8B")
    hidden, keys = model.hidden_size, model.num_key_value_heads * model.head_dim
    parameters = hidden * (2 * hidden + 2 * (hidden + keys) + 3 * model.intermediate_size + model.vocab_size)
    return Drafter("eagle", head_cost(model, get_hardware("H100"), parameters))


def _on_h100(drafter: Drafter) -> Speculation:
    return Speculation.of(known_model("Llama-3.1-8B"), get_hardware("H100"), drafter, (0.5,), CONTEXT)


def _speedup(speculation: Speculation, k: int, length: float) -> float:
    """Return the speed-up at a measured acceptance length, rather than at one derived from rates."""
    return length * speculation.plain(1).seconds / speculation.step(1, k).seconds
