"""One model on several GPUs, as tensor parallel, pipeline parallel or data parallel: what each sends, keeps and serves.

The scheduler is the real one under the virtual clock; a step's cost is that of `levers`. Everything is *modelled*.
`lever_checks.published_checks` says how far the step model is off, for tensor parallelism too; for pipelines it has
nothing to go by.

A pipeline of p stages works on p batches in turn. Each of them goes through all layers in the time that one GPU takes
for a batch of its size, plus the hand-overs, and by then the stages have worked on the others. So it is computed as
p schedulers, each with its share of the requests and of the places; weights and caches are spread over all GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.memory import memory_ledger, weight_bytes
from minivllm.simulate.cost_model import StepShape
from minivllm.simulate.hardware import Hardware
from minivllm.simulate.levers import LeverCost, Levers
from minivllm.simulate.virtual_clock import RequestTimeline, SimulatedRequest, simulate
from minivllm.simulate.workloads import poisson_arrivals, workload

WAYS = ("TP", "PP", "DP")
HANDOVER_SECONDS = 1e-5
"""Of sending hidden states from one stage to the next, beyond their bytes: assumed to be that of an all-reduce."""
SERVING = Levers(
    kv_cache=True, paging=True, continuous_batching=True, flash_attention=True, gqa=True, chunked_prefill=True,
    cuda_graphs=True,
)  # fmt: skip
MAX_MODEL_LEN, TOKEN_BUDGET, PLACES = 4096, 2048, 1024


def bytes_sent(way: str, gpus: int, tokens: int, hidden: int, layers: int, element: int = 2) -> float:
    """Bytes that each GPU sends in a step: two all-reduces a layer (TP), its last hidden states (PP), nothing (DP)."""
    states = tokens * hidden * element
    return {"TP": 2 * layers * 2 * (gpus - 1) / gpus * states, "PP": states if gpus > 1 else 0, "DP": 0}[way]


def bubble(stages: int, batches: int) -> float:
    """The share of a pipeline's time in which a stage has nothing to do while so many batches go through it."""
    return (stages - 1) / (batches + stages - 1)


@dataclass(frozen=True)
class Deployment:
    """`gpus` of a kind with one model, in one of the `WAYS`. One GPU is the same in all of them."""

    model: ModelConfig
    gpu: Hardware
    way: str
    gpus: int

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise MinivllmError(f"the way is {self.way!r}; known are {', '.join(WAYS)}")

    @property
    def groups(self) -> int:
        """Batches that are under way at the same time, each with a scheduler of its own."""
        return 1 if self.way == "TP" else self.gpus

    def kv_tokens(self) -> int:
        """How many tokens fit into the caches of all GPUs together.

        Raises:
            MinivllmError: the weights do not fit, or leave no room for one request.
        """
        tp = self.gpus if self.way == "TP" else 1
        weights = weight_bytes(self.model, "auto") // self.gpus if self.way == "PP" else None
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=MAX_MODEL_LEN, tp=tp, weights=weights,
            max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=PLACES, check=False,
        )  # fmt: skip
        # A stage keeps its own layers' keys and values: of a token, all stages together keep as much as one GPU would.
        blocks = ledger.usable_blocks * (1 if self.way == "TP" else self.gpus)
        if blocks // self.groups * 16 < MAX_MODEL_LEN:
            raise MinivllmError(f"{self.gpus} × {self.gpu.name} as {self.way}: no room for a request")
        return blocks * 16

    def cost(self) -> Cost:
        """What a step of one of its batches takes."""
        tp = self.gpus if self.way == "TP" else 1
        levers = replace(SERVING, tensor_parallel=tp)
        handovers = self.gpus - 1 if self.way == "PP" else 0
        sent = 2.0 * self.model.hidden_size
        return Cost(LeverCost.of(levers, self.model, self.gpu), handovers, sent)


@dataclass(frozen=True)
class Cost:
    """A step of a batch, and its way from stage to stage."""

    step: LeverCost
    handovers: int
    bytes_per_token: float

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step of this shape, modelled."""
        sent = self.bytes_per_token * shape.num_tokens / self.step.link
        return self.step.seconds(shape) + self.handovers * (HANDOVER_SECONDS + sent)


@dataclass(frozen=True)
class Served:
    """What clients saw of one group, and how many groups there are: all serve alike."""

    timelines: list[RequestTimeline]
    seconds: float
    groups: int

    def attainment(self, ttft: float, tpot: float) -> float:
        """The share of requests that met both objectives, in seconds."""
        met = sum(one.ttft <= ttft and one.tpot <= tpot for one in self.timelines)
        return met / len(self.timelines)

    @property
    def throughput(self) -> float:
        """Output tokens a second, of all groups together."""
        return self.groups * sum(len(one.token_times) for one in self.timelines) / self.seconds


def serve(deployment: Deployment, rate: float, seconds: float, kind: str = "sharegpt", seed: int = 0) -> Served:
    """Requests of a kind arrive at random, `rate` a second, for so long; all are served.

    Each group gets its share of them, which arrive at random too: one group is simulated, with at least 12 requests.

    Raises:
        MinivllmError: the model does not fit.
    """
    groups = deployment.groups
    share, half = rate / groups, MAX_MODEL_LEN // 2
    count = max(12, round(share * seconds))
    requests = [
        SimulatedRequest(min(one.prompt_tokens, half), min(one.output_tokens, half), at)
        for one, at in zip(workload(kind).sample(count, seed), poisson_arrivals(share, count, seed), strict=True)
    ]
    places = PLACES if deployment.way == "DP" else max(1, PLACES // groups)
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=places, max_num_batched_tokens=TOKEN_BUDGET)
    wanted = sum(-(-(one.prompt_tokens + one.output_tokens) // 16) + 1 for one in requests)
    blocks = min(deployment.kv_tokens() // 16 // groups, wanted)
    run = simulate(
        requests, config, CacheConfig(num_gpu_blocks=1 + blocks, enable_prefix_caching=False), deployment.cost()
    )
    return Served(run.requests, run.seconds - requests[0].arrival, groups)


def find_knee(attainment: Callable[[float], float], low: float, high: float, rounds: int, target: float = 0.9) -> float:
    """The highest rate at which at least `target` of the requests meet their service level, by bisection.

    `attainment(rate)` offers that load and returns the share that met it; it falls as the rate grows. If even `low` is
    too much, the answer is 0; if `high` can be borne, it is `high`. Else it is too low by (high - low) / 2 ** rounds at
    most.
    """
    if attainment(low) < target:
        return 0.0
    if attainment(high) >= target:
        return high
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment(middle) >= target else (low, middle)
    return low
