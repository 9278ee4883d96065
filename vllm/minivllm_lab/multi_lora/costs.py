"""Many LoRA adapters on one engine: who asks for which, and what a step costs applied together, in a loop, or merged.

Applied together, one shrink and one expand per group of linears (q, k, v; o; gate, up; down) serve all adapters of a
batch. In a loop, each adapter has launches of its own. Merged copies have none, but each is a model of its own: it
takes the memory of one, and a batch of d adapters is d forward passes. Everything is *modelled*.
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
from minivllm.config.checks import is_number, require
from minivllm.memory import weight_bytes
from minivllm.memory.adapters import ALL_LINEARS, adapter_bytes, adapter_parameters, linear_shapes
from minivllm_simulate.cost_model import ARITHMETIC_EFFICIENCY, MEMORY_EFFICIENCY, Cost, StepShape
from minivllm_simulate.hardware import Hardware

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Linears that read the same input, and share a launch."""
LAUNCH_SECONDS = 2e-3 / (32 * 7 * 2)
"""Of a kernel however little it does. Punica (arXiv 2310.18547) adds about 2 ms to a token of Llama-2-7B, with a shrink
and an expand for each of 7 linears in 32 layers: 4.5 µs each."""


def zipf_shares(adapters: int, skew: float) -> list[float]:
    """Shares of requests that ask for each of so many adapters, the most popular first: 1 / rank^skew, normalized.

    Raises:
        MinivllmError: no adapters, or a skew below 0 (all alike).
    """
    require(
        is_number(skew) and skew >= 0 and adapters >= 1, f"adapters is {adapters} and skew {skew!r}; 1 and 0 or more"
    )
    weights = [(index + 1) ** -skew for index in range(adapters)]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def zipf_adapters(adapters: int, skew: float, requests: int, seed: int = 0) -> list[int]:
    """Which adapter each request asks for, from 1; drawn at random, the same for the same seed."""
    shares = list(accumulate(zipf_shares(adapters, skew)))
    return [one + 1 for one in random.Random(f"zipf-{seed}").choices(range(adapters), cum_weights=shares, k=requests)]


def distinct_adapters(shares: Sequence[float], running: float) -> float:
    """How many adapters so many running requests have on average, if nobody waits for a slot.

    Each adapter's requests are then a Poisson number with the mean `running` * its share: 1 - e^-mean have some.
    """
    return sum(-math.expm1(-running * share) for share in shares)


def lru_hit_rate(shares: Sequence[float], slots: int) -> float:
    """Share of requests that find their adapter in an LRU of so many slots, one request after another.

    Che's approximation: an adapter is in if it was asked for within the last t requests, and t is such that the
    adapters that are in fill the slots (Che et al., 2002; it is exact as both numbers grow).
    """
    if slots >= len(shares):
        return 1.0
    t = float(slots)
    while True:  # Newton's steps approach from below, since the curve bends down
        misses = [math.exp(-t * share) for share in shares]
        step = (slots - len(shares) + sum(misses)) / sum(map(mul, shares, misses))
        t += step
        if step < 1e-6 * t:
            return 1 - sum(map(mul, shares, misses))


def wait_for_a_slot(shares: Sequence[float], load: float, stay: float, slots: int, most: float) -> float:
    """Seconds within which the share `most` of the requests have a slot for their adapter, in the long run.

    An adapter's first request waits for w seconds, and those that come meanwhile get in with it. It then keeps its slot
    as long as one of its requests runs: (e^x - 1) / rate seconds, with x = rate * stay, which is the busy period of a
    server with room for all. Each adapter goes round so, and w is such that as many as there are slots are in at a
    time. A closed form of means: what chance adds is left out, so real waits are a little longer.

    Args:
        shares: of the requests, for each adapter.
        load: requests a second.
        stay: seconds that a request runs.
        slots: adapters that are in at a time.
        most: a share of the requests, below 1.

    Returns:
        0 where no more adapters are wanted at a time than there are slots (`distinct_adapters`).
    """
    rates = [load * share for share in shares]
    idle = [math.exp(-rate * stay) for rate in rates]
    wait, over = 0.0, sum(1 - one for one in idle) - slots
    if over <= 0:
        return 0.0
    while over > 1e-3 * slots:  # Newton's steps approach from below, since the curve bends up
        rounds = [1 + rate * wait * one for rate, one in zip(rates, idle, strict=True)]
        terms = list(zip(rates, idle, rounds, strict=True))
        over = sum((1 - one) / turn for _, one, turn in terms) - slots
        wait += over / sum((1 - one) * rate * one / turn**2 for rate, one, turn in terms)
    starts = [rate * one / (1 + rate * wait * one) for rate, one in zip(rates, idle, strict=True)]
    waiting = sum(start * (1 + rate * wait) for start, rate in zip(starts, rates, strict=True)) - (1 - most) * load
    return min(wait, max(0.0, waiting / sum(map(mul, starts, rates))))


@dataclass(frozen=True)
class AdapterCost:
    """What a step takes with adapters in it, each in a slot as wide as `max_lora_rank`."""

    base: Cost
    """Of the step without any."""
    model: ModelConfig
    gpu: Hardware
    max_lora_rank: int
    targets: tuple[str, ...] = ALL_LINEARS
    memory_efficiency: float = MEMORY_EFFICIENCY
    arithmetic_efficiency: float = ARITHMETIC_EFFICIENCY

    @cached_property
    def slot_bytes(self) -> int:
        """Of a slot on the GPU, in 16 bits."""
        return adapter_bytes(self.model, self.max_lora_rank, self.targets)

    @cached_property
    def launches(self) -> int:
        """Kernels of a step: a shrink and an expand for each group of linears that has adapters."""
        groups = sum(any(name in self.targets for name in group) for group in GROUPS)
        return 2 * groups * self.model.num_hidden_layers

    @cached_property
    def row_bytes(self) -> int:
        """Moved for a token: inputs read once a group, outputs read and written, and what lies between, in 32 bits."""
        shapes = linear_shapes(self.model)
        read = sum(max((shapes[name][1] for name in group if name in self.targets), default=0) for group in GROUPS)
        added = sum(2 * shapes[name][0] for name in self.targets)
        return self.model.num_hidden_layers * (2 * (read + added) + 2 * 4 * self.max_lora_rank * len(self.targets))

    @cached_property
    def flops_per_token(self) -> int:
        """Two operations for each number of the slot."""
        return 2 * adapter_parameters(self.model, self.max_lora_rank, self.targets)

    def load_seconds(self, rank: int) -> float:
        """Seconds to copy an adapter of this rank from host memory into a slot, over half of PCIe's two directions."""
        return adapter_bytes(self.model, rank, self.targets) / (self.gpu.pcie / 2 * self.memory_efficiency)

    def lora_seconds(self, tokens: int, distinct: int, launches: int) -> float:
        """Of the adapters alone: launches, or what must be moved or computed where that takes longer."""
        if not distinct:
            return 0.0
        moved = distinct * self.slot_bytes + tokens * self.row_bytes
        memory = moved / (self.gpu.bandwidth * self.memory_efficiency)
        peak = self.gpu.flops_of("bfloat16")
        arithmetic = tokens * self.flops_per_token / (peak * self.arithmetic_efficiency)
        return max(launches * LAUNCH_SECONDS, memory, arithmetic)

    def seconds(self, shape: StepShape, distinct: int, lora_tokens: int | None = None) -> float:
        """Of a step in which so many adapters are applied together, to `lora_tokens` of its tokens (all of them)."""
        tokens = shape.num_tokens if lora_tokens is None else lora_tokens
        return self.base.seconds(shape) + self.lora_seconds(tokens, distinct, self.launches)

    def loop_seconds(self, shape: StepShape, distinct: int) -> float:
        """Of the same step with launches for each adapter apart."""
        return self.base.seconds(shape) + self.lora_seconds(shape.num_tokens, distinct, distinct * self.launches)

    def merged_seconds(self, shape: StepShape, distinct: int) -> float:
        """Of the same requests on merged copies: a forward pass for each adapter, with its share of the requests."""
        count = max(distinct, 1)
        part = StepShape(*(max(1, round(each / count)) for each in (
            shape.num_reqs, shape.num_tokens, shape.num_keys, shape.num_pairs
        )))  # fmt: skip
        return count * self.base.seconds(part)

    def copies_that_fit(self, budget: float) -> int:
        """How many merged copies of the model fit into so many bytes."""
        return int(budget // weight_bytes(self.model))
