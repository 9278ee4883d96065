"""Run lesson 12's load, requests for many adapters, through the engine's scheduler and slot table.

The same requests for the same adapters arrive at the same times with any number of slots, so the
slots alone explain every difference. The time of a step is modelled (`minivllm_simulate.layouts`,
`minivllm_lab.multi_lora.costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Protocol

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.lora_request import LoRARequest
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm.memory import MemoryLedger
from minivllm_lab.multi_lora.costs import (
    AdapterCost,
    distinct_adapters,
    wait_for_a_slot,
    zipf_adapters,
    zipf_shares,
)
from minivllm_lab.multi_lora.learner_policy import Admit, learner_policy
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import Layout, PlacedModel
from minivllm_simulate.load_sweep import Runs
from minivllm_simulate.memory import memory_ledger, rotary_table_bytes, weight_bytes
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.simulated_engine import Stretch
from minivllm_simulate.steady import Steady
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

PROMPT, ANSWER = 128, 128
"""Tokens of every prompt and every answer."""
COUNTED, AFTER = 120, 40
"""Requests that count, and requests that arrive after them."""
SEATS, BLOCK_SIZE, MAX_MODEL_LEN, TOKEN_BUDGET = 256, 16, 2048, 2048
SEED = 12
WARM = 4
"""Earlier requests per slot, which fill the slots before the first counted request arrives."""
MOST_BLOCKS = 1 + (COUNTED + AFTER) * -(-(PROMPT + ANSWER + 1) // BLOCK_SIZE)
"""The blocks that all requests together would take. Creating a larger pool would take longer
than the run.
"""
WINDOW = 24
"""Requests that arrive in the time that is drawn step by step."""


class Slots(Protocol):
    """The interface of exercise 12's slot table."""

    @property
    def slots(self) -> Sequence[int | None]:
        """Return the adapter in each slot, or None for a free slot."""
        ...

    def activate(self, adapter_id: int, /) -> int:
        """Put an adapter into a slot, and return the slot."""
        ...


Own = tuple[Callable[[int], Slots] | None, Admit | None]
"""The reader's parts of exercise 12; None keeps the engine's."""


@dataclass(frozen=True)
class Moment:
    """The slots and the queue during some steps; times are in seconds."""

    start: float
    end: float
    slots: tuple[int | None, ...]
    in_use: frozenset[int]
    """Adapters of running requests."""
    held_for: tuple[int, ...]
    """The adapters of the requests that wait only for a slot."""
    waiting: int
    """All requests that wait."""


@dataclass(frozen=True)
class Point:
    """The results of the requests with this many slots."""

    ttfts: Sequence[float]
    """Seconds to the first token, sorted; for a request without one, how long it has waited."""
    hits: int
    asked: int
    """Admitted requests; `hits` of them found their adapter in a slot."""
    loads: int
    """Copies from host memory into a slot."""
    distinct: float
    """Adapters of running requests, averaged over time."""
    waiting: float
    held: float
    """Requests that wait only for a slot."""
    cache_used: float
    """The used share of the KV cache."""
    strip: tuple[Moment, ...]

    @property
    def hit_rate(self) -> float:
        """Return the share of the admitted requests that found their adapter in a slot."""
        return self.hits / self.asked if self.asked else 0.0


class _Slotted(OpenEngine):
    """An engine that activates its requests' adapters in each step, and records slots and queue."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, serving: Serving, slots: Slots) -> None:
        super().__init__(load, scheduler, serving.cost.base)
        self.serving = serving
        self.slots = slots
        self.window = serving.window
        self.hits = self.asked = self.loads = 0
        self.active: set[int] = set()
        """The last step's adapters."""
        self.sums: dict[str, float] = dict.fromkeys(("distinct", "waiting", "held", "cache"), 0.0)
        self.strip: list[Moment] = []
        blocks = serving.ledger(len(slots.slots)).num_blocks
        self.share_of_cache = scheduler.kv_cache_manager.block_pool.num_usable_blocks / (blocks - 1)
        """The run's share of the KV cache's blocks."""
        for adapter in serving.before(len(slots.slots)):
            slots.activate(adapter)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        request = super().request(index, spec)
        request.lora_request = _lora_request(self.serving.asked_for[index])
        return request

    def seconds_of(self, stretch: Stretch) -> float:
        loads = self._activate()
        cost = self.serving.cost
        first = stretch.first
        applied = cost.lora_seconds(first.num_tokens, len(self.active), cost.launches)
        seconds = super().seconds_of(stretch) + stretch.steps * applied + loads * self.serving.load_seconds
        self._note_moment(seconds)
        return seconds

    def _activate(self) -> int:
        """Put an adapter into a slot."""
        assert self.scheduled
        held = set(self.slots.slots)
        new = [self.adapter_of[request.req_id] for request in self.scheduled.scheduled_new_reqs]
        self.asked += len(new)
        self.hits += len(new) - len(set(new) - held)  # requests admitted together share one load
        self.active = {self.adapter_of[key] for key in self.scheduled.num_scheduled_tokens}
        for adapter in sorted(self.active, key=lambda adapter: adapter not in held):  # the order of the engine's worker
            _activate(self.slots, adapter)
        loads = len(self.active - held)
        self.loads += loads
        return loads

    @cached_property
    def adapter_of(self) -> dict[str, int]:
        """Map each request's id to its adapter."""
        return {str(index): adapter for index, adapter in enumerate(self.serving.asked_for)}

    def _note_moment(self, seconds: float) -> None:
        scheduler = self.scheduler
        waiting = len(scheduler.waiting)
        held: list[int] = []
        if len(self.active) >= len(self.slots.slots):
            wanted = (self.adapter_of[request.request_id] for request in scheduler.waiting)
            held = [adapter for adapter in wanted if adapter not in self.active]
        now = {
            "distinct": len(self.active), "waiting": waiting, "held": len(held),
            "cache": scheduler.kv_cache_manager.usage * self.share_of_cache,
        }  # fmt: skip
        for name, value in now.items():
            self.sums[name] += value * seconds
        start, end = self.now, self.now + seconds
        if end > self.window[0] and start < self.window[1]:
            shown = tuple(self.slots.slots)
            self.strip.append(Moment(start, end, shown, frozenset(self.active), tuple(held), waiting))

    def watched(self) -> Generator[None, None, Point]:
        """Serve the load, and return the result."""
        result = yield from self.serve()
        over = result.end or 1.0
        return Point(
            ttfts=result.ttfts,
            hits=self.hits,
            asked=self.asked,
            loads=self.loads,
            distinct=self.sums["distinct"] / over,
            waiting=self.sums["waiting"] / over,
            held=self.sums["held"] / over,
            cache_used=self.sums["cache"] / over,
            strip=tuple(self.strip),
        )


def _activate(slots: Slots, adapter: int) -> None:
    """Put every adapter of the step into a slot, and return how many had to be copied.

    Raises:
        MinivllmError: The slot table returns a slot that does not hold the adapter.
    """
    slot = slots.activate(adapter)
    if not isinstance(slot, int) or not 0 <= slot < len(slots.slots) or slots.slots[slot] != adapter:
        raise MinivllmError(
            f"your table put adapter {adapter} into slot {slot!r}, but its slots hold {list(slots.slots)}"
        )


@lru_cache(maxsize=4096)
def _lora_request(adapter: int) -> LoRARequest:
    return LoRARequest(f"adapter-{adapter}", adapter, f"adapters/{adapter}")


@dataclass(frozen=True)
class Serving:
    """An engine on one GPU, its adapters and its load: everything but the number of slots."""

    name: str
    """The model's name."""
    model: ModelConfig
    gpu: Hardware
    adapters: int
    skew: float
    rank: int
    max_lora_rank: int
    load: float
    """Requests a second."""

    @cached_property
    def cost(self) -> AdapterCost:
        base = PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost
        return AdapterCost(base, self.model, self.gpu, self.max_lora_rank)

    @cached_property
    def load_seconds(self) -> float:
        return self.cost.load_seconds(self.rank)

    @cached_property
    def shares(self) -> list[float]:
        """Return each adapter's share of the requests."""
        return zipf_shares(self.adapters, self.skew)

    @cached_property
    def asked_for(self) -> list[int]:
        """Return the adapter that each request uses."""
        return zipf_adapters(self.adapters, self.skew, COUNTED + AFTER, SEED)

    def before(self, slots: int) -> list[int]:
        """Return the adapters that earlier requests used."""
        return zipf_adapters(self.adapters, self.skew, WARM * slots, SEED + 1)

    @cached_property
    def arrivals(self) -> list[float]:
        """Return the times, in seconds, at which requests arrive."""
        return gamma_arrivals(self.load, COUNTED + AFTER, seed=SEED)

    @property
    def window(self) -> tuple[float, float]:
        """Return the time span to draw."""
        first = COUNTED // 2
        return self.arrivals[first], self.arrivals[min(first + WINDOW, COUNTED + AFTER - 1)]

    def ledger(self, slots: int) -> MemoryLedger:
        """Return the memory ledger of the GPU with this many slots.

        Raises:
            MinivllmError: Too little is left for one request.
        """
        weights = weight_bytes(self.model) + rotary_table_bytes(self.model) + slots * self.cost.slot_bytes
        return memory_ledger(
            self.model, self.gpu, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=TOKEN_BUDGET,
            max_num_seqs=SEATS, block_size=BLOCK_SIZE, weights=weights,
        )  # fmt: skip

    def refusal(self, slots: int) -> str:
        """Explain why an engine with this many slots does not start, or return ""."""
        if self.rank > self.max_lora_rank:
            return f"adapters of rank {self.rank} do not fit into slots for rank {self.max_lora_rank}"
        try:
            self.ledger(slots)
        except MinivllmError as error:
            return str(error)
        return ""

    @cached_property
    def most_slots(self) -> float:
        """Return how many slots take all memory beside the weights."""
        return 0.0 if self.refusal(0) else self.ledger(0).kv_bytes / self.cost.slot_bytes

    @cached_property
    def copies_that_fit(self) -> int:
        """Return how many merged copies fit on the GPU, beside a cache for one request."""
        if self.refusal(0):
            return 0
        free = self.ledger(0)
        assert free.bytes_per_token is not None  # each layer keeps every token
        return 1 + int((free.kv_bytes - MAX_MODEL_LEN * free.bytes_per_token) // weight_bytes(self.model))

    @cached_property
    def at_once(self) -> float:
        """Return the mean number of concurrent requests if none waits for a slot, by Little's law;
        0 if none fits.
        """
        return 0.0 if self.refusal(0) else self.steady.batch(self.load)

    @cached_property
    def steady(self) -> Steady:
        """Return a steady batch with the adapters that its requests use, and with a slot for each."""
        base = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), SEATS)
        applied = _Applied(self.cost, cache(partial(distinct_adapters, self.shares)))
        return replace(base.steady(PROMPT, ANSWER, self.ledger(0).tokens), cost=applied)

    @cached_property
    def capacity(self) -> float:
        """Return the maximum request rate, per second, with a slot for each adapter; beyond it, the
        queue grows.
        """
        return self.steady.capacity()

    def long_wait(self, slots: int, most: float) -> float:
        """Return the seconds within which the share `most` of the requests gets a slot, if the load
        continues.
        """
        if slots >= self.adapters or not self.at_once:
            return 0.0
        return wait_for_a_slot(self.shares, self.load, self.at_once / self.load, slots, most)


@dataclass(frozen=True)
class _Applied:
    """A model of a step's time, with the mean number of adapters that its requests use."""

    cost: AdapterCost
    distinct: Callable[[int], float]

    def seconds(self, shape: StepShape) -> float:
        return self.cost.seconds(shape, round(self.distinct(shape.num_reqs)))


class Experiment:
    """The runs of one setting with any number of slots; results are kept, and an interrupted run
    can be resumed.
    """

    def __init__(self, serving: Serving, own: Own | None) -> None:
        self.serving = serving
        self.own = own
        self.runs = Runs(self._run)
        """Results by the number of slots."""
        self.refusal = lru_cache(maxsize=64)(serving.refusal)
        self.long_wait = lru_cache(maxsize=64)(serving.long_wait)

    def _run(self, slots: int) -> Generator[None, None, Point]:
        run = self._served(slots)
        return (yield from (patient(run, "your part") if self.own else run))

    def _served(self, slots: int) -> Generator[None, None, Point]:
        """Serve the load in a generator, so that the time to build the reader's parts is bounded
        too.
        """
        serving = self.serving
        table, admit = self.own or (None, None)
        lengths = [RequestLengths(PROMPT, ANSWER)] * (COUNTED + AFTER)
        load = OpenLoad(lengths, serving.arrivals, COUNTED, 0)
        engine = _Slotted(load, _scheduler(serving, slots, admit), serving, (table or AdapterSlots)(slots))
        return (yield from engine.watched())


def _scheduler(serving: Serving, slots: int, admit: Admit | None) -> Scheduler:
    """Build the engine's scheduler, with the reader's `admit` if there is one."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=SEATS, max_num_batched_tokens=TOKEN_BUDGET, max_loras=slots
    )
    blocks = min(serving.ledger(slots).num_blocks, MOST_BLOCKS)
    kv_cache = CacheConfig(num_gpu_blocks=blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False)
    return Scheduler(config, kv_cache, learner_policy(admit) if admit else DEFAULT_POLICY)


@lru_cache(maxsize=64)
def experiment(
    model: str,
    gpu: str,
    adapters: int,
    skew: float,
    rank: int,
    max_lora_rank: int,
    load: float,
    own: Own | None = None,
) -> Experiment:
    """Return the experiment with this setting; it keeps the results of earlier runs.

    Raises:
        MinivllmError: The model or GPU is unknown.
    """
    serving = Serving(model, known_model(model), get_hardware(gpu), adapters, skew, rank, max_lora_rank, load)
    return Experiment(serving, own)
