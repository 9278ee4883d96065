"""One model on several GPUs as TP × PP × DP: whether it fits, the cost of a step, and the number of
parallel schedulers.

A step's cost is that of `levers`, including all-reduces over the data sheet's links. Its known
error holds for tensor parallelism too; for pipelines there is no measurement to check against.
Everything is *modelled*.

A pipeline of p stages works on p batches in turn. Each batch goes through all layers in the time
that one GPU takes for a batch of its size, plus the hand-overs, and by then the stages have worked
on the others. So it is modelled as p schedulers, each with its share of the requests and of the
seats; weights and caches are spread over all GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.config.checks import require
from minivllm.config.units import GIB
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.levers import SERVING, LeverCost
from minivllm_simulate.memory import memory_ledger, weight_bytes
from minivllm_simulate.steady import Steady

MAX_MODEL_LEN, TOKEN_BUDGET, PLACES, BLOCK_SIZE = 4096, 2048, 256, 16
HANDOVER_SECONDS = 1e-5
"""The time of sending hidden states from one stage to the next, beyond their bytes: assumed to be
that of an all-reduce.
"""
UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""


class Layout(NamedTuple):
    """`dp` engines, each a pipeline of `pp` stages, each stage split over `tp` GPUs."""

    tp: int
    pp: int
    dp: int

    @property
    def gpus(self) -> int:
        """The total number of GPUs."""
        return self.tp * self.pp * self.dp

    @property
    def groups(self) -> int:
        """Batches in flight at the same time, each with a scheduler of its own in the
        simulation.
        """
        return self.pp * self.dp

    def __str__(self) -> str:
        stages = f" × PP {self.pp}" if self.pp > 1 else ""
        return f"TP {self.tp}{stages} × DP {self.dp}"


@dataclass(frozen=True)
class PlacedCost:
    """The cost of a batch's step and of its hand-overs from stage to stage."""

    step: LeverCost
    handovers: int
    bytes_per_token: float

    def seconds(self, shape: StepShape) -> float:
        """Return the modelled seconds of one step of this shape."""
        sent = self.bytes_per_token * shape.num_tokens / self.step.link
        return self.step.seconds(shape) + self.handovers * (HANDOVER_SECONDS + sent)


@dataclass(frozen=True)
class PlacedModel:
    """A model on GPUs of one kind in this layout."""

    model: ModelConfig
    gpu: Hardware
    layout: Layout
    max_num_seqs: int = PLACES
    """The limit of an engine; the batches of its pipeline share it."""

    def kv_tokens(self) -> int:
        """Return how many tokens fit into the cache of one group: an engine, or one of the batches
        in its pipeline.

        Raises:
            MinivllmError: the heads or layers cannot be divided like this, or the weights leave no room
                for one request.
        """
        tp, pp = self.layout.tp, self.layout.pp
        require(pp <= self.model.num_hidden_layers, f"{pp} stages cannot share {self.model.num_hidden_layers} layers")
        weights, budget = weight_bytes(self.model, "auto", tp) // pp, UTILIZATION * self.gpu.memory_bytes
        words = f"weights take {weights / GIB:.1f} GiB of each GPU, of which {budget / GIB:.1f} may be used"
        require(weights < budget, words)
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=MAX_MODEL_LEN, tp=tp, gpu_memory_utilization=UTILIZATION,
            weights=weights if pp > 1 else None,
            max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=self.max_num_seqs, check=False,
        )  # fmt: skip
        # A stage keeps its own layers' keys and values only, so p stages have room for p times as
        # many tokens; and p batches share it.
        tokens = ledger.usable_blocks * BLOCK_SIZE
        require(tokens >= MAX_MODEL_LEN, f"{words}, so no request of {MAX_MODEL_LEN:,} tokens fits beside them")
        return tokens

    @cached_property
    def cost(self) -> PlacedCost:
        """The cost of one batch's step."""
        levers, handovers = replace(SERVING, tensor_parallel=self.layout.tp), self.layout.pp - 1
        sent = 2.0 * self.model.hidden_size
        return PlacedCost(LeverCost.of(levers, self.model, self.gpu), handovers, sent)

    @property
    def places(self) -> int:
        """The maximum number of requests that a group runs at once."""
        return max(1, self.max_num_seqs // self.layout.pp)

    def configs(self, most_tokens: int) -> tuple[SchedulerConfig, CacheConfig]:
        """Return the configs of one group's scheduler and cache; the pool has at most the blocks
        that `most_tokens` could use.
        """
        blocks = min(self.kv_tokens(), most_tokens) // BLOCK_SIZE
        scheduler = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=self.places, max_num_batched_tokens=TOKEN_BUDGET
        )
        return scheduler, CacheConfig(num_gpu_blocks=1 + blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False)

    def steady(self, prompt: float, output: float, kv_tokens: int) -> Steady:
        """Return the equilibrium of one group for requests with these mean lengths."""
        return Steady.within(self.cost, prompt, output, seats=self.places, kv_tokens=kv_tokens, budget=TOKEN_BUDGET)
