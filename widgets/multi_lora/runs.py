"""The runs behind lesson 12's widget: requests for many adapters, through the engine's scheduler and slot table.

The same requests for the same adapters come at the same moments whatever the number of slots is, so that all
differences are the slots'. A step's time is modelled (`minivllm_simulate.layouts`, `minivllm_lab.multi_lora.costs`).
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
from minivllm.memory import MemoryLedger, memory_ledger, rotary_table_bytes, weight_bytes
from minivllm_lab.multi_lora.costs import (
    AdapterCost,
    distinct_adapters,
    lru_hit_rate,
    wait_for_a_slot,
    zipf_adapters,
    zipf_shares,
)
from minivllm_lab.multi_lora.learner_policy import Admit, learner_policy
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import Layout, PlacedModel, Steady
from minivllm_simulate.load_sweep import Runs
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.simulated_engine import Stretch
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

PROMPT, ANSWER = 128, 128
"""Tokens of every request."""
COUNTED, AFTER = 120, 40
"""Requests that are looked at, and those that come after them."""
PLACES, BLOCK_SIZE, MAX_MODEL_LEN, TOKEN_BUDGET = 256, 16, 2048, 2048
SEED = 12
WARM = 4
"""Requests for each slot that have gone before, so that slots are not empty when the first counted one comes."""
MOST_BLOCKS = 1 + (COUNTED + AFTER) * -(-(PROMPT + ANSWER + 1) // BLOCK_SIZE)
"""Of the pool that runs have: what all requests would take. Making more of them would take longer than the run."""
WINDOW = 24
"""Requests that come in the stretch of time that is drawn step by step."""


class Slots(Protocol):
    """A slot table as exercise 12 asks for it."""

    @property
    def slots(self) -> Sequence[int | None]:
        """The adapter in each slot; None: it is free."""
        ...

    def activate(self, adapter_id: int, /) -> int:
        """The slot of an adapter from now on."""
        ...


Own = tuple[Callable[[int], Slots] | None, Admit | None]
"""The reader's own parts of exercise 12; None leaves the engine's own."""


@dataclass(frozen=True)
class Moment:
    """The slots and the queue during a stretch of steps; times in seconds."""

    start: float
    end: float
    slots: tuple[int | None, ...]
    in_use: frozenset[int]
    """Adapters of running requests."""
    held: int
    """Requests that wait for a slot only."""
    waiting: int
    """All that wait."""


@dataclass(frozen=True)
class Point:
    """What became of the requests with so many slots."""

    ttfts: Sequence[float]
    """Seconds to the first token, from the shortest; of one that has none yet, what it waited."""
    hits: int
    asked: int
    """Requests that were admitted; `hits` found their adapter in a slot."""
    loads: int
    """Copies from host memory into a slot."""
    distinct: float
    """Adapters of running requests, averaged over time."""
    running: float
    waiting: float
    held: float
    """Of those that wait, the ones that wait for a slot only."""
    cache_used: float
    """Share of the KV cache."""
    tokens_per_second: float
    strip: tuple[Moment, ...]

    @property
    def hit_rate(self) -> float:
        """Share of the admitted requests that found their adapter in a slot."""
        return self.hits / self.asked if self.asked else 0.0


class _Slotted(OpenEngine):
    """An engine whose requests name adapters: activates them step by step, and notes slots and queue."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, serving: Serving, slots: Slots) -> None:
        super().__init__(load, scheduler, serving.cost.base)
        self.serving, self.slots = serving, slots
        self.window = serving.window
        self.hits = self.asked = self.loads = 0
        self.active: set[int] = set()
        """Adapters of the last step."""
        self.sums: dict[str, float] = dict.fromkeys(("distinct", "running", "waiting", "held", "cache"), 0.0)
        self.strip: list[Moment] = []
        blocks = serving.ledger(len(slots.slots)).num_blocks
        self.share_of_cache = scheduler.kv_cache_manager.block_pool.num_usable_blocks / (blocks - 1)
        """Of the KV cache's blocks, those that the run's pool has."""
        for adapter in serving.before(len(slots.slots)):
            slots.activate(adapter)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        """With the adapter that it names."""
        request = super().request(index, spec)
        request.lora_request = _lora_request(self.serving.asked_for[index])
        return request

    def seconds_of(self, stretch: Stretch) -> float:
        """The steps, their adapters, and the copies into slots before them."""
        loads = self._activate()
        cost, first = self.serving.cost, stretch.first
        applied = cost.lora_seconds(first.num_tokens, len(self.active), cost.launches)
        seconds = super().seconds_of(stretch) + stretch.steps * applied + loads * self.serving.load_seconds
        self._note_moment(seconds)
        return seconds

    def _activate(self) -> int:
        """Gives every adapter of the step its slot; returns how many had to be copied."""
        assert self.scheduled
        held = set(self.slots.slots)
        new = [self.everyone[one.req_id] for one in self.scheduled.scheduled_new_reqs]
        self.asked += len(new)
        self.hits += len(new) - len(set(new) - held)  # who comes in with another finds what that one has loaded
        self.active = {self.everyone[key] for key in self.scheduled.num_scheduled_tokens}
        for adapter in sorted(self.active, key=lambda one: one not in held):  # the engine's worker has this order too
            _activate(self.slots, adapter)
        loads = len(self.active - held)
        self.loads += loads
        return loads

    @cached_property
    def everyone(self) -> dict[str, int]:
        """The adapter of every request, by its id."""
        return {str(index): adapter for index, adapter in enumerate(self.serving.asked_for)}

    def _note_moment(self, seconds: float) -> None:
        scheduler, most = self.scheduler, len(self.slots.slots)
        waiting, held = len(scheduler.waiting), 0
        if len(self.active) >= most:
            held = sum(self.everyone[one.request_id] not in self.active for one in scheduler.waiting)
        assert self.scheduled
        now = {
            "distinct": len(self.active), "running": len(self.scheduled.num_scheduled_tokens), "waiting": waiting,
            "held": held, "cache": scheduler.kv_cache_manager.usage * self.share_of_cache,
        }  # fmt: skip
        for name, value in now.items():
            self.sums[name] += value * seconds
        start, end = self.now, self.now + seconds
        if end > self.window[0] and start < self.window[1]:
            shown = tuple(self.slots.slots)
            self.strip.append(Moment(start, end, shown, frozenset(self.active), held, waiting))

    def watched(self) -> Generator[None, None, Point]:
        """Run to the end; returns what has been seen."""
        result = yield from self.serve()
        over = result.end or 1.0
        return Point(
            ttfts=result.ttfts,
            hits=self.hits,
            asked=self.asked,
            loads=self.loads,
            distinct=self.sums["distinct"] / over,
            running=self.sums["running"] / over,
            waiting=self.sums["waiting"] / over,
            held=self.sums["held"] / over,
            cache_used=self.sums["cache"] / over,
            tokens_per_second=result.tokens / over,
            strip=tuple(self.strip),
        )


def _activate(slots: Slots, adapter: int) -> None:
    """Gives an adapter its slot.

    Raises:
        MinivllmError: the slot table does not say where it is then.
    """
    slot = slots.activate(adapter)
    if not isinstance(slot, int) or not 0 <= slot < len(slots.slots) or slots.slots[slot] != adapter:
        raise MinivllmError(f"your slots say that adapter {adapter} is in slot {slot!r}, and slots is {slots.slots}")


@lru_cache(maxsize=4096)
def _lora_request(adapter: int) -> LoRARequest:
    return LoRARequest(f"adapter-{adapter}", adapter, f"adapters/{adapter}")


@dataclass(frozen=True)
class Serving:
    """An engine on one GPU, its adapters, and what it is to serve; all but the number of slots."""

    name: str
    """The model's."""
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
        """What a step takes."""
        base = PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost
        return AdapterCost(base, self.model, self.gpu, self.max_lora_rank)

    @cached_property
    def load_seconds(self) -> float:
        """Seconds to copy one adapter into a slot."""
        return self.cost.load_seconds(self.rank)

    @cached_property
    def shares(self) -> list[float]:
        """Of the requests, for each adapter."""
        return zipf_shares(self.adapters, self.skew)

    @cached_property
    def asked_for(self) -> list[int]:
        """The adapter of each request."""
        return zipf_adapters(self.adapters, self.skew, COUNTED + AFTER, SEED)

    def before(self, slots: int) -> list[int]:
        """Adapters that were asked for before the first request."""
        return zipf_adapters(self.adapters, self.skew, WARM * slots, SEED + 1)

    @cached_property
    def arrivals(self) -> list[float]:
        """Seconds at which requests come, at random."""
        return gamma_arrivals(self.load, COUNTED + AFTER, seed=SEED)

    @property
    def window(self) -> tuple[float, float]:
        """The time that is drawn."""
        first = COUNTED // 2
        return self.arrivals[first], self.arrivals[min(first + WINDOW, COUNTED + AFTER - 1)]

    def ledger(self, slots: int) -> MemoryLedger:
        """Where the GPU's memory goes with so many slots.

        Raises:
            MinivllmError: too little is left for one request.
        """
        weights = weight_bytes(self.model) + rotary_table_bytes(self.model) + slots * self.cost.slot_bytes
        return memory_ledger(
            self.model, self.gpu, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=TOKEN_BUDGET,
            max_num_seqs=PLACES, block_size=BLOCK_SIZE, weights=weights,
        )  # fmt: skip

    def refusal(self, slots: int) -> str:
        """Why an engine with so many slots does not start; empty where it does."""
        if self.rank > self.max_lora_rank:
            return f"adapters of rank {self.rank} do not fit into slots for rank {self.max_lora_rank}"
        try:
            self.ledger(slots)
        except MinivllmError as error:
            return str(error)
        return ""

    @cached_property
    def copies_that_fit(self) -> int:
        """Merged copies of the model on the GPU, with a cache for one request beside them."""
        if self.refusal(0):
            return 0
        free = self.ledger(0)
        assert free.bytes_per_token is not None  # each layer keeps every token
        return 1 + int((free.kv_bytes - MAX_MODEL_LEN * free.bytes_per_token) // weight_bytes(self.model))

    @cached_property
    def at_once(self) -> float:
        """Requests at once on average if nobody waits for a slot, by Little's law (`layouts.Steady`); 0: none fits."""
        return 0.0 if self.refusal(0) else self.steady.batch(self.load)

    @cached_property
    def steady(self) -> Steady:
        """A batch that stays as it is, with as many adapters as its requests ask for, and a slot for each."""
        base = PlacedModel(self.model, self.gpu, Layout(1, 1, 1), PLACES)
        applied = _Applied(self.cost, cache(partial(distinct_adapters, self.shares)))
        return replace(base.steady(PROMPT, ANSWER, self.ledger(0).tokens), cost=applied)

    @cached_property
    def capacity(self) -> float:
        """Requests a second at most, with a slot for each adapter: if more come, the queue grows."""
        return self.steady.capacity

    def long_wait(self, slots: int, most: float) -> float:
        """Seconds within which the share `most` of the requests have a slot, however long the load goes on."""
        if slots >= self.adapters or not self.at_once:
            return 0.0
        return wait_for_a_slot(self.shares, self.load, self.at_once / self.load, slots, most)

    def hit_rate(self, slots: int) -> float:
        """By Che's approximation, one request after another."""
        return _hit_rate(self.adapters, self.skew, slots)


@lru_cache(maxsize=1024)
def _hit_rate(adapters: int, skew: float, slots: int) -> float:
    return lru_hit_rate(zipf_shares(adapters, skew), slots)


@dataclass(frozen=True)
class _Applied:
    """What a step takes with as many adapters in it as its requests have on average."""

    cost: AdapterCost
    distinct: Callable[[int], float]

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step of this shape."""
        return self.cost.seconds(shape, round(self.distinct(shape.num_reqs)))


class Experiment:
    """All numbers of slots in one setting. What has been run is kept, and a run that was left is taken up again."""

    def __init__(self, serving: Serving, own: Own | None) -> None:
        self.serving, self.own = serving, own
        self.runs = Runs(self._run)
        """By slots."""
        self.refusal = lru_cache(maxsize=64)(serving.refusal)
        self.long_wait = lru_cache(maxsize=64)(serving.long_wait)

    def _run(self, slots: int) -> Generator[None, None, Point]:
        run = self._served(slots)
        return (yield from (patient(run, "your part") if self.own else run))

    def _served(self, slots: int) -> Generator[None, None, Point]:
        """A generator, so that the reader's parts are made no sooner than somebody is patient with them."""
        serving = self.serving
        table, admit = self.own or (None, None)
        lengths = [RequestLengths(PROMPT, ANSWER)] * (COUNTED + AFTER)
        load = OpenLoad(lengths, serving.arrivals, COUNTED, 0)
        engine = _Slotted(load, _scheduler(serving, slots, admit), serving, (table or AdapterSlots)(slots))
        return (yield from engine.watched())


def _scheduler(serving: Serving, slots: int, admit: Admit | None) -> Scheduler:
    """The engine's, or the engine's with the reader's own gate."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=PLACES, max_num_batched_tokens=TOKEN_BUDGET, max_loras=slots
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
    """The runs of this setting, those done before included.

    Raises:
        MinivllmError: no such model or GPU.
    """
    serving = Serving(model, known_model(model), get_hardware(gpu), adapters, skew, rank, max_lora_rank, load)
    return Experiment(serving, own)
