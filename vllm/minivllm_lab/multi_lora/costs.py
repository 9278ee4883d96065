"""Model many LoRA adapters on one engine: their traffic, and the cost of a step that applies them
together, in a loop, or as merged copies.

Applied together, all adapters of a batch share one shrink and one expand per group of linears (q,
k, v; o; gate, up; down). In a loop, each adapter has its own launches. Merged copies need none, but
each takes the memory of a model, and a batch with d adapters takes d forward passes. Everything is
*modelled*.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

from minivllm.config import ModelConfig
from minivllm.memory.adapters import linear_shapes
from minivllm_simulate.cost_model import ARITHMETIC_EFFICIENCY, MEMORY_EFFICIENCY, Cost, StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.memory import adapter_bytes, adapter_parameters, weight_bytes

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears that read the same input and share a launch."""
LAUNCH_SECONDS = 2e-3 / (32 * 7 * 2)
"""The time of a kernel that does almost nothing. Punica (arXiv 2310.18547) adds about 2 ms to a
token of Llama-2-7B, with a shrink and an expand for each of 7 linears in 32 layers: 4.5 µs each.
"""


def zipf_shares(adapters: int, skew: float) -> list[float]:
    """Return each adapter's share of the requests, most popular first: 1 / rank^skew, normalized."""
    weights = [(index + 1) ** -skew for index in range(adapters)]
    total = sum(weights)
    return [weight / total for weight in weights]


def zipf_adapters(adapters: int, skew: float, requests: int, seed: int = 0) -> list[int]:
    """Draw an adapter number, 1 or higher, for each request; the same seed gives the same adapters."""
    shares = list(accumulate(zipf_shares(adapters, skew)))
    return random.Random(f"zipf-{seed}").choices(range(1, adapters + 1), cum_weights=shares, k=requests)


def distinct_adapters(shares: Sequence[float], running: float) -> float:
    """Return how many adapters `running` requests use on average, if no request waits for a slot.

    The number of an adapter's requests is then Poisson-distributed with mean `running` * share, so
    the adapter is in use with probability 1 - e^-mean.
    """
    return sum(-math.expm1(-running * share) for share in shares)


def wait_for_a_slot(shares: Sequence[float], load: float, stay: float, slots: int, most: float) -> float:
    """Return the long-run time within which the share `most` of the requests get a slot for their
    adapter.

    An adapter's first request waits for w seconds, and requests that arrive meanwhile get the slot
    together with it. The adapter keeps its slot as long as one of its requests runs: (e^x - 1) /
    rate seconds with x = rate * stay, the busy period of a server with room for all. Each adapter
    cycles like this, and w is such that all slots are in use. All of these are means without random
    variation, so real waits are a little longer.

    Args:
        shares: each adapter's share of the requests.
        load: requests a second.
        stay: seconds that a request runs.
        slots: adapters that can be in use at a time.
        most: the share of the requests to cover, below 1.

    Returns:
        Seconds; 0 where all adapters in use fit into the slots (`distinct_adapters`).
    """
    rates = [load * share for share in shares]
    idle = [math.exp(-rate * stay) for rate in rates]
    wait, over = 0.0, sum(1 - share for share in idle) - slots
    if over <= 0:
        return 0.0
    while over > 1e-3 * slots:  # Newton's steps approach from below, since the curve bends up
        cycles = [1 + rate * wait * share for rate, share in zip(rates, idle, strict=True)]
        terms = list(zip(rates, idle, cycles, strict=True))
        over = sum((1 - share) / cycle for _, share, cycle in terms) - slots
        wait += over / sum((1 - share) * rate * share / cycle**2 for rate, share, cycle in terms)
    starts = [rate * share / (1 + rate * wait * share) for rate, share in zip(rates, idle, strict=True)]
    waiting = sum(start * (1 + rate * wait) for start, rate in zip(starts, rates, strict=True)) - (1 - most) * load
    return min(wait, max(0.0, waiting / sum(map(mul, starts, rates))))


@dataclass(frozen=True)
class AdapterCost:
    """The modelled time of a step with adapters, each in a slot as wide as `max_lora_rank`."""

    base: Cost
    """The cost of the step without adapters."""
    model: ModelConfig
    gpu: Hardware
    max_lora_rank: int
    memory_efficiency: float = MEMORY_EFFICIENCY
    arithmetic_efficiency: float = ARITHMETIC_EFFICIENCY

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot on the GPU, at 16 bits per number."""
        return adapter_bytes(self.model, self.max_lora_rank)

    @cached_property
    def launches(self) -> int:
        """Kernel launches per step: a shrink and an expand for each group of linears."""
        return 2 * len(GROUPS) * self.model.num_hidden_layers

    @cached_property
    def row_bytes(self) -> int:
        """Bytes moved per token: inputs once per group, outputs read and written, and the 32-bit
        numbers between shrink and expand.
        """
        shapes = linear_shapes(self.model)
        read = sum(shapes[group[0]][1] for group in GROUPS)
        added = sum(2 * outputs for outputs, _ in shapes.values())
        return self.model.num_hidden_layers * (2 * (read + added) + 2 * 4 * self.max_lora_rank * len(shapes))

    @cached_property
    def flops_per_token(self) -> int:
        """FLOPs per token: two for each parameter of the slot."""
        return 2 * adapter_parameters(self.model, self.max_lora_rank)

    def load_seconds(self, rank: int) -> float:
        """Return the time to copy an adapter of this rank from host memory into a slot, over one
        direction of PCIe.
        """
        return adapter_bytes(self.model, rank) / (self.gpu.pcie / 2 * self.memory_efficiency)

    def lora_seconds(self, tokens: int, distinct: int, launches: int) -> float:
        """Return the time that the adapters add: the longest of launches, memory traffic and
        arithmetic.
        """
        if not distinct:
            return 0.0
        moved = distinct * self.slot_bytes + tokens * self.row_bytes
        memory = moved / (self.gpu.bandwidth * self.memory_efficiency)
        peak = self.gpu.flops_of("bfloat16")
        arithmetic = tokens * self.flops_per_token / (peak * self.arithmetic_efficiency)
        return max(launches * LAUNCH_SECONDS, memory, arithmetic)

    def seconds(self, shape: StepShape, distinct: int, lora_tokens: int | None = None) -> float:
        """Return the time of a step that applies `distinct` adapters together to `lora_tokens`
        tokens (None: all).
        """
        tokens = shape.num_tokens if lora_tokens is None else lora_tokens
        return self.base.seconds(shape) + self.lora_seconds(tokens, distinct, self.launches)

    def loop_seconds(self, shape: StepShape, distinct: int) -> float:
        """Return the time of the same step with separate launches for each adapter."""
        return self.base.seconds(shape) + self.lora_seconds(shape.num_tokens, distinct, distinct * self.launches)

    def copies_that_fit(self, budget: float) -> int:
        """Return how many merged copies of the model fit into `budget` bytes."""
        return int(budget // weight_bytes(self.model))
