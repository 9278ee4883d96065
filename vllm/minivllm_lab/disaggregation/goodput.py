"""The goodput of two pools of GPUs, one that prefills and one that decodes, and of the same number
of GPUs that do both.

    pair = Disaggregated(model, gpu, prefill=1, decode=1, link=get_link("400 Gb/s"))
    goodput(pair, Work(1024, 128), Objective(ttft=0.3, tpot=0.02)).per_gpu

Goodput is the highest rate at which 90 % of the requests have both their first token and the
following ones in time. Bisection finds it: the real schedulers serve every rate that is tried
(`pools`, `open_load`), with a step's cost from `layouts`. Everything is *modelled*; `model_checks`
says how far it is from published figures.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.disaggregation.pools import PARTS, Pools, SimulatedConnector, run_pools
from minivllm_simulate.cost_model import Cost, StepShape, chunk_seconds
from minivllm_simulate.deployments import find_knee
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.kv_links import Link
from minivllm_simulate.layouts import BLOCK_SIZE, PLACES, Layout, PlacedModel
from minivllm_simulate.open_load import OpenLoad, finished, run_open
from minivllm_simulate.steady import Steady
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

SHARE = 0.9
"""Share of the requests that must be in time."""
PREFILL_BUDGET = 2048
"""Tokens of a prefilling engine's step: with more, prompts would only wait for one another."""
BOUND_BY = {"prefill": "queue", "link": "link", "decode": "tpot", "both": "ttft"}
"""The cause of lateness where each part is always busy, named as `Served.cause` names it."""
COUNTED = 200
SEED = 8


class Objective(NamedTuple):
    """The service-level objective in seconds: time to the first token, and time per token after it."""

    ttft: float
    tpot: float


@dataclass(frozen=True)
class Work:
    """Requests of equal lengths, or requests drawn from a workload, with prompts and answers cut
    after `longest` tokens.
    """

    prompt: int
    output: int
    source: Workload | None = None
    counted: int = COUNTED
    longest: int = 4096

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """The lengths of a run's requests: the counted ones, and as many again to keep the load up."""
        if self.source is None:
            return [RequestLengths(self.prompt, self.output)] * (2 * self.counted)
        drawn = self.source.sample(2 * self.counted, SEED)
        return [
            RequestLengths(min(request.prompt_tokens, self.longest), min(request.output_tokens, self.longest))
            for request in drawn
        ]

    @cached_property
    def means(self) -> tuple[float, float]:
        """Mean tokens of a prompt and of an answer."""
        prompts, outputs = zip(
            *((request.prompt_tokens, request.output_tokens) for request in self.lengths), strict=True
        )
        return statistics.mean(prompts), statistics.mean(outputs)


@dataclass(frozen=True)
class Client:
    """One client's latencies in seconds, and the parts of its time to first token where they are
    known.
    """

    ttft: float
    tpot: float
    parts: dict[str, float] = field(default_factory=dict)


class Served(NamedTuple):
    """The counted requests at one rate."""

    rate: float
    clients: list[Client]

    def attainment(self, objective: Objective) -> float:
        """Return the share of requests that met both objectives."""
        met = sum(client.ttft <= objective.ttft and client.tpot <= objective.tpot for client in self.clients)
        return met / len(self.clients)

    def late(self, objective: Objective) -> tuple[float, float]:
        """Return the share of requests whose first token was late, and the share whose following
        tokens were.
        """
        first = sum(client.ttft > objective.ttft for client in self.clients)
        following = sum(client.tpot > objective.tpot for client in self.clients)
        return first / len(self.clients), following / len(self.clients)

    def cause(self, objective: Objective) -> str:
        """Return why most late requests were late: "tpot", or the largest of PARTS; an empty string
        if none was late.

        Colocated engines do not split the time to first token, so for them it is "ttft" instead of
        a part.
        """
        first, following = self.late(objective)
        if max(first, following) == 0:
            return ""
        if following >= first:
            return "tpot"
        slow = [client.parts for client in self.clients if client.ttft > objective.ttft]
        if not all(slow):
            return "ttft"
        return max(PARTS, key=lambda part: sum(parts[part] for parts in slow))

    def mean(self, part: str) -> float:
        """Return the mean seconds that the requests spent in one of PARTS."""
        return statistics.mean(client.parts[part] for client in self.clients)


class _OneGpuEngines(ABC):
    """Engines on one GPU each."""

    model: ModelConfig
    gpu: Hardware
    cost: Cost | None

    @abstractmethod
    def bounds(self, work: Work, objective: Objective) -> dict[str, float]:
        """Return the rate at which each part is always busy: a key of BOUND_BY."""

    def bound(self, work: Work, objective: Objective) -> float:
        """Return the lowest of `bounds`."""
        return min(self.bounds(work, objective).values())

    def bound_by(self, work: Work, objective: Objective) -> str:
        """Return what is late beyond the bound: a value of BOUND_BY."""
        bounds = self.bounds(work, objective)
        return BOUND_BY[min(bounds, key=bounds.__getitem__)]

    @cached_property
    def placed(self) -> PlacedModel:
        """The model on one of the GPUs."""
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES)

    @cached_property
    def step_cost(self) -> Cost:
        """The cost of one engine's step."""
        return self.cost or self.placed.cost


@dataclass(frozen=True)
class Disaggregated(_OneGpuEngines):
    """`prefill` GPUs that compute prompts, `decode` GPUs that generate, and a link; one engine on
    each GPU.

    `cost` replaces the model's cost of a step, `connector` the connector beside each scheduler (see
    `Pools`).
    """

    model: ModelConfig
    gpu: Hardware
    prefill: int
    decode: int
    link: Link
    layer_wise: bool = False
    budget: int = PREFILL_BUDGET
    cost: Cost | None = None
    connector: Callable[[bool], SimulatedConnector] | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs in both pools."""
        return self.prefill + self.decode

    @property
    def simulated_gpus(self) -> int:
        """The GPUs that serve a run's requests: all of them."""
        return self.gpus

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        """Serve requests that arrive at random, on average `rate` per second."""
        load = self.load(work, rate)
        journeys = yield from run_pools(self.pools(work, load.at_start), load)
        return Served(rate, [Client(journey.ttft, journey.tpot or 0.0, journey.parts) for journey in journeys])

    def load(self, work: Work, rate: float) -> OpenLoad:
        """Draw random arrivals, and start with as many requests as are being decoded at this rate
        on average.
        """
        in_decode = self.decode * self.steady(work).batch(rate / self.decode)
        return OpenLoad(work.lengths, arrivals(work, rate), work.counted, round(in_decode))

    def pools(self, work: Work, at_start: int | None = None) -> Pools:
        """Return the engines' settings; `at_start` requests, by default as many as fit, are already
        being decoded at the start.
        """
        placed, come = self.placed, len(work.lengths)
        in_decode = PLACES * self.decode if at_start is None else at_start
        return Pools(
            prefill=self.prefill,
            decode=self.decode,
            prefill_configs=engine_configs(placed, self.budget, work, -(-come // self.prefill)),
            decode_configs=engine_configs(
                placed, self.budget, work, -(-come // self.decode) + -(-in_decode // self.decode)
            ),
            cost=self.step_cost,
            link=self.link,
            bytes_per_token=self.bytes_per_token,
            layers=self.model.num_hidden_layers,
            layer_wise=self.layer_wise,
            connector=self.connector,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values, over all layers."""
        return kv_bytes_per_token(self.model)

    def steady(self, work: Work) -> Steady:
        """Return the equilibrium of one decoding GPU."""
        seats = min(self.placed.places, self.placed.kv_tokens() // sum(work.means))
        return Steady.within(self.step_cost, *work.means, seats=seats, prefill="elsewhere")

    def bounds(self, work: Work, objective: Objective) -> dict[str, float]:
        """Return the rate at which each part ("prefill", "link", "decode") is always busy, with
        decoding held to the objective.
        """
        prompt, _ = work.means
        links = min(self.prefill, self.decode)
        return {
            "prefill": self.prefill / prefill_seconds(self.step_cost, prompt, self.budget),
            "link": links * self.link.bandwidth / (prompt * self.bytes_per_token),
            "decode": self.decode * self.steady(work).capacity(objective.tpot),
        }


@dataclass(frozen=True)
class Colocated(_OneGpuEngines):
    """`gpus` engines that prefill and decode, with `budget` tokens per step; each gets every
    `gpus`-th request.
    """

    model: ModelConfig
    gpu: Hardware
    gpus: int
    budget: int = 2048
    chunked_prefill: bool = True
    cost: Cost | None = None

    @property
    def simulated_gpus(self) -> int:
        """The GPUs that serve a run's requests: one, which stands for the others."""
        return 1

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        """Serve one engine's requests, which stand for those of the other engines."""
        running = round(self.steady(work).batch(rate / self.gpus))
        scheduler, cache = engine_configs(self.placed, self.budget, work, len(work.lengths) + running)
        scheduler = replace(scheduler, enable_chunked_prefill=self.chunked_prefill)
        load = OpenLoad(work.lengths, arrivals(work, rate / self.gpus, self.gpus), work.counted, running, seed=SEED)
        run = yield from run_open(load, scheduler, cache, self.step_cost)
        clients = [
            Client(run.ttft(stay), stay.tpot or 0.0) if stay.ended or stay.tokens > 1 else Client(math.inf, math.inf)
            for stay in run.stays
        ]
        return Served(rate, clients)

    def steady(self, work: Work) -> Steady:
        """Return the equilibrium of one engine, whose budget must hold the prompts that join in a step, too."""
        return Steady.within(
            self.step_cost, *work.means, seats=min(self.placed.places, self.budget),
            kv_tokens=self.placed.kv_tokens(), budget=self.budget, prefill="spread",
        )  # fmt: skip

    def bounds(self, work: Work, objective: Objective) -> dict[str, float]:
        """Return the highest rate that the engines reach with any batch that fits."""
        del objective
        return {"both": self.gpus * self.steady(work).capacity()}


def prefill_seconds(cost: Cost, prompt: float, budget: int) -> float:
    """Return a prompt's GPU seconds; short prompts share a step in the number that is cheapest
    within the budget.
    """
    length = max(1, round(prompt))
    if length >= budget:
        return chunk_seconds(cost, length, budget)
    return min(cost.seconds(StepShape.of([(length, 0)] * many)) / many for many in range(1, budget // length + 1))


def arrivals(work: Work, rate: float, turns: int = 1) -> list[float]:
    """Draw one engine's arrivals in a run: every `turns`-th of the requests that arrive at random."""
    return gamma_arrivals(rate, len(work.lengths), burstiness=turns, seed=SEED)


def engine_configs(
    placed: PlacedModel, budget: int, work: Work, num_requests: int
) -> tuple[SchedulerConfig, CacheConfig]:
    """Return the settings of one engine's scheduler, with as many blocks as the GPU's memory holds.

    There are no more blocks than `num_requests` requests could use, since creating a block takes
    time.
    """
    longest = max(request.total for request in work.lengths)
    scheduler, cache = placed.configs((longest + 2 * BLOCK_SIZE) * num_requests)
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": min(placed.places, budget)}
    return replace(scheduler, **sizes, max_model_len=max(2 * longest, 16)), cache


System = Disaggregated | Colocated


class Goodput(NamedTuple):
    """The highest rate that is sustained, and what fails beyond it."""

    rate: float
    gpus: int
    cause: str

    @property
    def per_gpu(self) -> float:
        """Requests a second per GPU."""
        return self.rate / self.gpus


def for_each_gpu(work: Work, system: System) -> Work:
    """Return the work of a run in which each GPU serves `work.counted` requests, so that two pools
    run for as long as one, of which a single engine is simulated.
    """
    return replace(work, counted=work.counted * system.simulated_gpus)


def goodput(system: System, work: Work, objective: Objective, rounds: int = 7) -> Goodput:
    """Find the highest rate at which SHARE of the requests are in time, to within `bound` / 2 **
    `rounds` and never above `bound`.

    A short run ends before the queue of a rate that is too high has grown: with 60 requests, pools
    seem to sustain up to their bound. With 200 for each GPU, the result differs from that of runs
    ten times as long by less than from one seed of arrivals to the next.
    """
    served: dict[float, Served] = {}

    def attainment(rate: float) -> float:
        served[rate] = finished(system.serve(work, rate))
        return served[rate].attainment(objective)

    high = system.bound(work, objective)
    rate = find_knee(attainment, high / 2**rounds, high, rounds, SHARE) if high else 0.0
    broken = [result for at, result in served.items() if at > rate]
    cause = min(broken, key=lambda result: result.rate).cause(objective) if broken else system.bound_by(work, objective)
    return Goodput(rate, system.gpus, cause)
