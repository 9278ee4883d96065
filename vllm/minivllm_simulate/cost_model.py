"""The cost of one step in seconds, from a data sheet.

A step's shape is a few counts: requests, new tokens, keys read, and (query, key) pairs that
attention visits. `RooflineCost` turns them into bytes and operations and divides them by a GPU's
rates. It leaves out per-request work that no roofline knows (sampling, small launches, attention
that does not reach the peak) and that grows with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from minivllm.config import ModelConfig
from minivllm.memory import kv_bytes_per_token, serving_dtype
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.memory import parameter_groups, routed_parameters, weight_bytes
from minivllm_simulate.memory.parameters import bytes_of_dtype

MEMORY_EFFICIENCY = 0.9
"""Share of the data sheet's bandwidth that a decode step reaches, beside `STEP_OVERHEAD`. The two
put Llama-3.1-8B on an H100 at the 6.44 ms that vLLM's blog of 2026-04-22 measured as the intercept
of inter-token latency over context; the data sheet alone gives 4.8 ms.
"""
STEP_OVERHEAD = 1.1e-3
"""Seconds of a step that neither bytes nor operations explain: see `MEMORY_EFFICIENCY`."""
ARITHMETIC_EFFICIENCY = 0.64
"""Share of the data sheet's operations that a prefill reaches from end to end. Our engine on an
H200, whose arithmetic is an H100's (benchmarks/results/gpu_engine.nvidia-h200.json): prompts of 8 x
1,024 tokens take 185.5 ms, one of 8,192 takes 210.3; less the overhead, that is 632 and 631 of the
sheet's 989 TFLOP/s. The second has eight times the first's pairs of query and key, so attention's
operations run at the share of all others, and one factor is for both.
"""
MATMUL_EFFICIENCY = 0.81
"""The share that a bare matmul of bf16 matrices reaches there: 806 TFLOP/s. Another engine's
prefill, with its operations fused and attention's kernel faster, lies between
`ARITHMETIC_EFFICIENCY` and this: see `at_best`.
"""


class StepShape(NamedTuple):
    """The work of a step, in counts."""

    num_reqs: int
    num_tokens: int
    """New tokens: chunks of prompts and decodes alike."""
    num_keys: int
    """Keys read: the length of every scheduled request, this step's tokens included."""
    num_pairs: int
    """(query, key) pairs under the causal mask."""

    @classmethod
    def of(cls, scheduled: Iterable[tuple[int, int]]) -> StepShape:
        """Count the work from (new tokens, tokens computed before) of each scheduled request."""
        reqs = tokens = keys = pairs = 0
        for new, before in scheduled:
            reqs += 1
            tokens += new
            keys += before + new
            pairs += new * before + new * (new + 1) // 2
        return cls(reqs, tokens, keys, pairs)

    @classmethod
    def without_cache(cls, scheduled: Iterable[tuple[int, int]]) -> StepShape:
        """Return the same step without a KV cache: everything computed before is recomputed."""
        return cls.of((new + before, 0) for new, before in scheduled)


class Cost(Protocol):
    """A model of how long a step takes."""

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of one step of this shape."""
        ...


class UnitCost:
    """A cost of one unit of time for every step, for runs in which only tokens are counted."""

    def seconds(self, shape: StepShape) -> float:
        """Return 1 for every step."""
        return 1.0


@dataclass(frozen=True)
class RooflineCost:
    """The cost of a step as the larger of memory time and arithmetic time, plus a fixed overhead.

    Weights are read once per step and keys once per request. A token costs two operations for each
    parameter of the layers that it passes: in a mixture of experts, only the experts that it
    chooses, and in a vision tower none. A request costs two operations per weight of the head,
    since only its last token is sampled from; a pair costs four per head dimension. Kernels reach a
    share of the data sheet's rates, one for memory and one for arithmetic: the constants above cite
    the measurement behind each. Every answer is *modelled*.

    The host's time is not included. Our engine launches a prefill kernel by kernel, which takes 12
    to 20 ms for this model, so its 512 tokens take 16.5 ms on an H200 where the model predicts
    12.5; vLLM's compiled pieces have another floor.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: float
    flops_per_pair: float
    bandwidth: float
    flops: float
    flops_per_request: float = 0.0
    vision_bytes: float = 0.0
    """Bytes of `weight_bytes` that a step of text does not read."""
    expert_bytes: float = 0.0
    """Bytes of `weight_bytes` that are experts, all those that a router chooses from."""
    expert_share: float = 1.0
    """Share of the experts that one token chooses: `num_experts_per_tok / num_experts`."""
    memory_efficiency: float = MEMORY_EFFICIENCY
    arithmetic_efficiency: float = ARITHMETIC_EFFICIENCY
    step_overhead: float = STEP_OVERHEAD

    @classmethod
    def of(
        cls, model: ModelConfig, hardware: Hardware, dtype: str = "auto", kv_dtype: str = "auto", tp: int = 1,
        **more: float,
    ) -> RooflineCost:  # fmt: skip
        """Return the cost of a model on each of `tp` equal GPUs; the traffic between them is not
        counted.

        Raises:
            UnsupportedModelError: layers that do not keep every token.
            MinivllmError: the hardware has no units for the dtype.
        """
        dtype = serving_dtype(model) if dtype == "auto" else dtype
        head, size, experts = model.vocab_size * model.hidden_size, bytes_of_dtype(dtype), 1.0
        if model.num_experts:
            model.require("num_experts_per_tok")
            experts = model.num_experts_per_tok / model.num_experts
        return cls(
            weight_bytes=weight_bytes(model, dtype, tp),
            kv_bytes_per_token=kv_bytes_per_token(model, kv_dtype, tp),
            flops_per_token=2 * _passed_parameters(model, experts) / tp,
            flops_per_request=2 * head / tp,
            vision_bytes=size * parameter_groups(model, tp).get("vision", 0),
            expert_bytes=size * routed_parameters(model, tp),
            expert_share=experts,
            flops_per_pair=4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim / tp,
            bandwidth=hardware.bandwidth,
            flops=hardware.flops_of(dtype),
            **more,
        )

    def weight_bytes_read(self, num_tokens: float) -> float:
        """Return the bytes of weights that a step of `num_tokens` tokens reads; experts that no
        token chooses are not read.

        A token leaves an expert out with probability 1 - `expert_share`, so n tokens all do with
        that probability to the power n, if every expert is equally likely. Real routers have
        favourites, so a step reads fewer experts.
        """
        left_out = self.expert_bytes * (1 - self.expert_share) ** num_tokens
        return self.weight_bytes - self.vision_bytes - left_out

    def bytes_moved(self, shape: StepShape) -> float:
        """Return the bytes that must cross the memory bus: the weights that the tokens use, and
        every key and value once.
        """
        return self.weight_bytes_read(shape.num_tokens) + self.kv_bytes_per_token * (shape.num_keys + shape.num_tokens)

    def operations(self, shape: StepShape) -> float:
        """Count the step's floating-point operations."""
        linear = self.flops_per_token * shape.num_tokens + self.flops_per_request * shape.num_reqs
        return linear + self.flops_per_pair * shape.num_pairs

    def floor_seconds(self, shape: StepShape) -> float:
        """Return a lower bound on the seconds, from the data sheet's rates."""
        return max(self.bytes_moved(shape) / self.bandwidth, self.operations(shape) / self.flops)

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds to move `num_bytes` bytes at the share of the peak bandwidth that
        kernels reach.
        """
        return num_bytes / (self.bandwidth * self.memory_efficiency)

    def arithmetic_seconds(self, operations: float) -> float:
        """Return the seconds to do `operations` operations at the share of the peak that kernels
        reach.
        """
        return operations / (self.flops * self.arithmetic_efficiency)

    def seconds(self, shape: StepShape) -> float:
        """Return the modelled seconds of one step of this shape."""
        moved, computed = self.bytes_moved(shape), self.operations(shape)
        work = max(self.memory_seconds(moved), self.arithmetic_seconds(computed))
        return self.step_overhead + work

    @property
    def knee(self) -> float:
        """The number of tokens above which a step's arithmetic takes longer than reading the
        weights of all experts.
        """
        return self.memory_seconds(self.weight_bytes_read(math.inf)) / self.arithmetic_seconds(self.flops_per_token)

    def at_best(self) -> RooflineCost:
        """Return the same cost with arithmetic at the rate of a bare matmul, which no prefill is
        expected to beat.
        """
        return replace(self, arithmetic_efficiency=max(self.arithmetic_efficiency, MATMUL_EFFICIENCY))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a real engine and its measured seconds."""

    shape: StepShape
    seconds: float


def _passed_parameters(model: ModelConfig, expert_share: float) -> float:
    """Return the number of parameters in the layers that a text token passes."""
    groups = parameter_groups(model)
    layers = sum(size for name, size in groups.items() if name not in ("embedding", "head", "vision"))
    return layers - (1 - expert_share) * routed_parameters(model)


def chunk_seconds(cost: Cost, prompt: int, budget: int) -> float:
    """Return the seconds of a lone prompt that is computed in chunks of `budget` tokens."""
    starts = range(0, prompt, budget)
    return sum(cost.seconds(StepShape.of([(min(budget, prompt - start), start)])) for start in starts)
