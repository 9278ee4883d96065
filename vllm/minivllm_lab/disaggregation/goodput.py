"""Two pools of GPUs, one that prefills and one that decodes, beside as many GPUs that do both: what each bears.

    pair = Disaggregated(model, gpu, prefill=1, decode=1, link=get_link("400 Gb/s"))
    goodput(pair, Work(1024, 128), Objective(ttft=0.3, tpot=0.02)).per_gpu

Goodput is the highest rate at which 90 % of the requests have both their first token and the following ones in time. It
is found by bisection: every rate that is tried is served by the real schedulers (`pools`, `open_load`), with a step's
cost from `layouts`. Everything is *modelled*; `model_checks` says how far it is off published figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.config.checks import require
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.disaggregation.pools import PARTS, PoolLoad, Pools, SimulatedConnector, run_pools
from minivllm_simulate.cost_model import Cost, StepShape, chunk_seconds
from minivllm_simulate.deployments import find_knee
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.kv_links import Link
from minivllm_simulate.layouts import BLOCK_SIZE, PLACES, Layout, PlacedModel
from minivllm_simulate.open_load import OpenLoad, finished, run_open
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

SHARE = 0.9
"""Of the requests that must be in time."""
PREFILL_BUDGET = 2048
"""Tokens of a prefilling engine's step: more would only make prompts wait for one another."""
COUNTED = 200
SEED = 8


@dataclass(frozen=True)
class Objective:
    """What a client is promised, in seconds: to the first token, and per token after it."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        require(min(self.ttft, self.tpot) > 0, f"ttft is {self.ttft}, tpot {self.tpot}; both are above 0 seconds")


@dataclass(frozen=True)
class Work:
    """Requests of equal lengths, or of a workload; then `longest` tokens of each prompt and answer are kept."""

    prompt: int
    output: int
    source: Workload | None = None
    counted: int = COUNTED
    longest: int = 4096

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """Of all requests of a run: those that are counted, and as many that keep the load up."""
        if self.source is None:
            return [RequestLengths(self.prompt, self.output)] * (2 * self.counted)
        drawn = self.source.sample(2 * self.counted, SEED)
        return [
            RequestLengths(min(one.prompt_tokens, self.longest), min(one.output_tokens, self.longest)) for one in drawn
        ]

    @cached_property
    def means(self) -> tuple[float, float]:
        """Tokens of a prompt and of an answer."""
        prompts, outputs = zip(*((one.prompt_tokens, one.output_tokens) for one in self.lengths), strict=True)
        return statistics.mean(prompts), statistics.mean(outputs)


@dataclass(frozen=True)
class Client:
    """What one request's client saw, in seconds, and what its time to first token went into, where that is known."""

    ttft: float
    tpot: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """What became of the counted requests at one rate."""

    rate: float
    clients: list[Client]

    def attainment(self, objective: Objective) -> float:
        """The share of requests that had both in time."""
        met = sum(one.ttft <= objective.ttft and one.tpot <= objective.tpot for one in self.clients)
        return met / len(self.clients)

    def late(self, objective: Objective) -> tuple[float, float]:
        """The shares of requests whose first token, and whose following tokens, came too late."""
        first = sum(one.ttft > objective.ttft for one in self.clients)
        return first / len(self.clients), sum(one.tpot > objective.tpot for one in self.clients) / len(self.clients)

    def cause(self, objective: Objective) -> str:
        """Why most of the late ones were late: "tpot", or the largest of PARTS; empty where none was late.

        Of colocated engines the parts are not known: it is "ttft" then.
        """
        first, following = self.late(objective)
        if max(first, following) == 0:
            return ""
        if following >= first:
            return "tpot"
        slow = [one.parts for one in self.clients if one.ttft > objective.ttft]
        if not all(slow):
            return "ttft"
        return max(PARTS, key=lambda part: sum(parts[part] for parts in slow))

    def mean(self, part: str) -> float:
        """Seconds of one of PARTS, on average."""
        return statistics.mean(one.parts[part] for one in self.clients)


class System(Protocol):
    """Some GPUs that serve."""

    @property
    def gpus(self) -> int:
        """How many."""
        ...

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        """What becomes of requests that come at `rate` a second, with pauses."""
        ...

    def bound(self, work: Work, objective: Objective) -> float:
        """A rate that it cannot exceed for long."""
        ...

    def bound_by(self, work: Work, objective: Objective) -> str:
        """What is busy all the time at that rate, in the words of `Served.cause`."""
        ...


@dataclass(frozen=True)
class Disaggregated:
    """`prefill` GPUs that compute prompts, `decode` GPUs that generate, and what links them; one engine on each."""

    model: ModelConfig
    gpu: Hardware
    prefill: int
    decode: int
    link: Link
    layer_wise: bool = False
    shared: bool = False
    budget: int = PREFILL_BUDGET
    cost: Cost | None = None
    """What a step takes, in place of the model's."""
    connector: Callable[[bool], SimulatedConnector] | None = None
    """What stands beside each scheduler; see `Pools`."""

    def __post_init__(self) -> None:
        require(
            min(self.prefill, self.decode) >= 1,
            f"there are {self.prefill} prefilling and {self.decode} decoding GPUs; each takes one at least",
        )

    @property
    def gpus(self) -> int:
        """How many there are in all."""
        return self.prefill + self.decode

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        """What becomes of requests that come at random, `rate` a second."""
        load = self.load(work, rate)
        journeys = yield from run_pools(self.pools(work, load.at_start), load)
        return Served(rate, [Client(one.ttft, one.tpot, one.parts) for one in journeys])

    def load(self, work: Work, rate: float) -> PoolLoad:
        """Requests at random, and as many already there as are decoded at this rate on average."""
        there = self.decode * self.decoding.batch(work, rate / self.decode)
        return PoolLoad(work.lengths, arrivals(work, rate), work.counted, round(there))

    def pools(self, work: Work, at_start: int | None = None) -> Pools:
        """The engines' settings, where so many requests are decoded at the start; by default as many as can be."""
        placed, come = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES), len(work.lengths)
        there = PLACES * self.decode if at_start is None else at_start
        return Pools(
            prefill=self.prefill,
            decode=self.decode,
            prefill_configs=engine_configs(placed, self.budget, work, -(-come // self.prefill)),
            decode_configs=engine_configs(
                placed, self.budget, work, -(-come // self.decode) + -(-there // self.decode)
            ),
            cost=self.step_cost,
            link=self.link,
            bytes_per_token=self.bytes_per_token,
            layers=self.model.num_hidden_layers,
            layer_wise=self.layer_wise,
            shared=self.shared,
            connector=self.connector,
        )

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, all layers together."""
        return kv_bytes_per_token(self.model)

    @cached_property
    def step_cost(self) -> Cost:
        """What a step of one engine takes."""
        return self.cost or PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost

    @cached_property
    def decoding(self) -> Decoding:
        """What one decoding GPU comes to."""
        placed = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES)
        return Decoding(self.step_cost, placed.kv_tokens(), placed.places)

    def bounds(self, work: Work, objective: Objective) -> dict[str, float]:
        """The rate at which each part is busy all the time: "prefill", "link", "decode" within the objective."""
        prompt, _ = work.means
        ways = 1 if self.shared else min(self.prefill, self.decode)
        return {
            "prefill": self.prefill / prefill_seconds(self.step_cost, prompt, self.budget),
            "link": ways * self.link.bandwidth / (prompt * self.bytes_per_token),
            "decode": self.decode * self.decoding.capacity(work, objective.tpot),
        }

    def bound(self, work: Work, objective: Objective) -> float:
        """The least of `bounds`."""
        return min(self.bounds(work, objective).values())

    def bound_by(self, work: Work, objective: Objective) -> str:
        """Whose bound that is."""
        bounds = self.bounds(work, objective)
        return {"prefill": "queue", "link": "link", "decode": "tpot"}[min(bounds, key=bounds.__getitem__)]

    def alone(self, work: Work) -> float:
        """Seconds to the first token of a request that nobody else is there with."""
        prompt = round(work.means[0])
        prefill = chunk_seconds(self.step_cost, prompt, self.budget)
        sent = self.link.seconds(prompt * self.bytes_per_token)
        if self.layer_wise:
            layers = self.model.num_hidden_layers
            sent = max(sent / layers, sent + prefill / layers - prefill)
        return prefill + sent + self.step_cost.seconds(StepShape.of([(1, prompt - 1)]))


@dataclass(frozen=True)
class Colocated:
    """`gpus` engines that prefill and decode, `budget` tokens a step; each gets every `gpus`-th request."""

    model: ModelConfig
    gpu: Hardware
    gpus: int
    budget: int = 2048
    chunked_prefill: bool = True
    cost: Cost | None = None

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        """What becomes of one engine's requests, which is like what becomes of the others'."""
        placed = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES)
        there = round(self.mixed(work).batch(rate / self.gpus))
        scheduler, cache = engine_configs(placed, self.budget, work, len(work.lengths) + there)
        scheduler = replace(scheduler, enable_chunked_prefill=self.chunked_prefill)
        load = OpenLoad(work.lengths, arrivals(work, rate / self.gpus, self.gpus), work.counted, there, seed=SEED)
        run = yield from run_open(load, scheduler, cache, self.step_cost)
        clients = [
            Client(run.ttft(one), one.tpot or 0.0) if one.ended or one.tokens > 1 else Client(math.inf, math.inf)
            for one in run.stays
        ]
        return Served(rate, clients)

    @cached_property
    def step_cost(self) -> Cost:
        """What a step of one engine takes."""
        return self.cost or PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost

    def mixed(self, work: Work) -> Mixed:
        """What one engine comes to."""
        placed = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES)
        return Mixed(self.step_cost, placed.kv_tokens(), min(placed.places, self.budget), self.budget, work)

    def bound(self, work: Work, objective: Objective) -> float:
        """All work of a request, done in the largest batches that memory and places allow."""
        del objective
        return self.gpus * self.mixed(work).capacity

    def bound_by(self, work: Work, objective: Objective) -> str:
        """Requests wait: for their first token."""
        del work, objective
        return "ttft"


@dataclass(frozen=True)
class Decoding:
    """A decoding GPU: batches that fit, and the rates that they come to."""

    cost: Cost
    kv_tokens: int
    places: int

    def most(self, work: Work) -> int:
        """Requests at once."""
        return max(1, min(self.places, int(self.kv_tokens / sum(work.means))))

    def step_seconds(self, work: Work, batch: int) -> float:
        """Seconds of a step, its requests being half-way through their answers on average."""
        prompt, output = work.means
        keys = batch * (1 + round(prompt + output / 2))
        return self.cost.seconds(StepShape(batch, batch, keys, keys))

    def capacity(self, work: Work, tpot: float) -> float:
        """Requests a second at most, none of whose tokens takes longer than `tpot`; 0 if even one alone does."""
        steps = {batch: self.step_seconds(work, batch) for batch in _batches(self.most(work))}
        rates = (batch / (work.means[1] * seconds) for batch, seconds in steps.items() if seconds <= tpot)
        return max(rates, default=0.0)

    def batch(self, work: Work, rate: float) -> float:
        """How many requests are there at this rate, by Little's law; `most` where it is too much."""
        low, high = 0.0, float(self.most(work))
        for _ in range(12):
            middle = (low + high) / 2
            there = rate * work.means[1] * self.step_seconds(work, max(1, round(middle)))
            low, high = (middle, high) if there > middle else (low, middle)
        return low


@dataclass(frozen=True)
class Mixed:
    """A GPU that does both."""

    cost: Cost
    kv_tokens: int
    places: int
    budget: int
    work: Work

    def seconds(self, batch: float) -> float:
        """Seconds of a step of so many requests, to which each answer's end makes room for a prompt."""
        prompt, output = self.work.means
        joining = batch / output * prompt
        keys = batch * (prompt + output / 2) + joining
        pairs = batch * (prompt + output / 2) + joining * prompt / 2
        return self.cost.seconds(StepShape(round(batch), round(batch + joining), round(keys), round(pairs)))

    @cached_property
    def most(self) -> float:
        """Requests at once; what joins in a step must fit into its budget too."""
        prompt, output = self.work.means
        return max(1.0, min(self.places, self.kv_tokens / (prompt + output), self.budget / (1 + prompt / output)))

    @cached_property
    def capacity(self) -> float:
        """Requests a second at most. A batch is a mean here: where prompts are long, fewer than two fill a budget."""
        batches = (self.most * share / 64 for share in range(1, 65))
        return max(batch / (self.work.means[1] * self.seconds(batch)) for batch in batches)

    def batch(self, rate: float) -> float:
        """How many requests are there at this rate."""
        low, high = 0.0, self.most
        for _ in range(12):
            middle = (low + high) / 2
            there = rate * self.work.means[1] * self.seconds(max(1.0, middle))
            low, high = (middle, high) if there > middle else (low, middle)
        return low


def _batches(most: int) -> list[int]:
    """Batches up to the largest, in steps of at most a sixteenth."""
    return sorted({max(1, round(most * share / 64)) for share in range(1, 65)})


def prefill_seconds(cost: Cost, prompt: float, budget: int) -> float:
    """GPU seconds of a prompt, in steps as full as the budget allows."""
    length = max(1, round(prompt))
    if length >= budget:
        return chunk_seconds(cost, length, budget)
    return min(cost.seconds(StepShape.of([(length, 0)] * many)) / many for many in range(1, budget // length + 1))


def arrivals(work: Work, rate: float, turns: int = 1) -> list[float]:
    """When the requests of a run come: at random, of which one engine gets every `turns`-th."""
    return gamma_arrivals(rate, len(work.lengths), burstiness=turns, seed=SEED)


def engine_configs(
    placed: PlacedModel, budget: int, work: Work, num_requests: int
) -> tuple[SchedulerConfig, CacheConfig]:
    """For one engine's scheduler, with as many blocks as the GPU's memory holds.

    No more than `num_requests` come to it, so it gets no blocks that these could not use: to make a block takes time.
    """
    longest = max(one.total for one in work.lengths)
    scheduler, cache = placed.configs((longest + 2 * BLOCK_SIZE) * num_requests)
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": min(placed.places, budget)}
    return replace(scheduler, **sizes, max_model_len=max(2 * longest, 16)), cache


@dataclass(frozen=True)
class Goodput:
    """The highest rate that is borne, and what breaks beyond it."""

    rate: float
    gpus: int
    cause: str

    @property
    def per_gpu(self) -> float:
        """Requests a second and GPU."""
        return self.rate / self.gpus


def goodput(system: System, work: Work, objective: Objective, rounds: int = 7) -> Goodput:
    """The highest rate at which SHARE of the requests are in time, to `bound` / 2 ** `rounds`, and never above it.

    A run has an end, so it may bear a little more than could be borne for long; the bound is what holds then.
    """
    served: dict[float, Served] = {}

    def attainment(rate: float) -> float:
        served[rate] = finished(system.serve(work, rate))
        return served[rate].attainment(objective)

    high = system.bound(work, objective)
    rate = find_knee(attainment, high / 2**rounds, high, rounds, SHARE) if high else 0.0
    broken = [one for at, one in served.items() if at > rate]
    cause = min(broken, key=lambda one: one.rate).cause(objective) if broken else system.bound_by(work, objective)
    return Goodput(rate, system.gpus, cause)
