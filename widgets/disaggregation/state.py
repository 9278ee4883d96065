"""The state of lesson 08's widget: who is in time over the rate, in two pools and in one, and where each breaks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm_lab.disaggregation.goodput import SHARE, Colocated, Disaggregated, Objective, Served, Work
from minivllm_lab.disaggregation.tuning import likely_first
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import LINKS, Transfer, get_link
from minivllm_simulate.lever_checks import known_error, published_checks
from minivllm_simulate.load_sweep import Runs
from widgets.disaggregation.connector import CheckedConnector, ConnectorScheduler
from widgets.shell.spec import require_numbers
from widgets.shell.swept import patient

MODELS = ("Llama-3.2-3B", "Llama-3.1-8B", "Llama-2-13b-hf", "Qwen3-14B", "Qwen3-32B")
GPUS = ("A100-80", "H100", "H200", "B200", "MI300X")
MOST_OF_A_KIND = 3
PROMPTS, OUTPUTS, BUDGETS = (256, 512, 1024, 2048, 4096), (16, 64, 128, 256), (256, 512, 1024, 2048, 8192)
TUNED = 0
"""In place of a budget: the best of `LADDER`."""
LADDER = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 8192)
RATES = (
    1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 56.0, 80.0, 112.0, 160.0, 224.0, 320.0, 450.0,
    640.0, 900.0,
)  # fmt: skip
"""Requests a second, over all GPUs."""
COUNTED = 60
"""Requests that are looked at in a run."""
MOST = {"rate": 1e4, "prefill": 8, "decode": 8, "prompt": 8192, "output": 1024, "budget": 65536, "ttft": 1e3,
        "tpot": 1e3}  # fmt: skip
START = {
    "rate": 28.0, "prefill": 2, "decode": 2, "link": "400 Gb/s", "layer_wise": False, "ttft": 0.2, "tpot": 0.0075,
    "budget": TUNED, "model": "Llama-3.1-8B", "gpu": "H100", "prompt": 1024, "output": 128,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """Some GPUs, at every rate that has been run so far."""

    prefill: int
    """Of them, those that prefill; 0: each does both."""
    gpus: int
    points: Mapping[float, Served]
    objective: Objective
    bound: float
    """A rate that cannot be exceeded for long."""
    bound_by: str = ""
    """What is busy all the time at that rate, in the words of `Served.cause`."""
    budget: int = 0
    """Tokens of a step, where each GPU does both."""
    refused: str = ""
    """Why the model does not fit; empty where it does."""

    @property
    def name(self) -> str:
        """How many prefill and how many decode."""
        return f"{self.prefill} + {self.gpus - self.prefill}" if self.prefill else f"{self.gpus} that do both"

    @cached_property
    def rates(self) -> list[float]:
        """The rates that have been run."""
        return sorted(self.points)

    @cached_property
    def _shares(self) -> dict[float, float]:
        return {rate: self.points[rate].attainment(self.objective) for rate in self.rates}

    def share(self, rate: float) -> float:
        """Of the requests at a rate that has been run, those that were in time."""
        return self._shares[rate]

    def breaks(self, rate: float) -> bool:
        """Whether too few are in time, at a rate that has been run."""
        return self.share(rate) < SHARE or rate > self.bound

    def is_flat_at(self, rate: float) -> bool:
        """Whether as many are in time at the rates on both sides that have been run, so the line is right between."""
        place = bisect_left(self.rates, rate)
        return 0 < place < len(self.rates) and self.share(self.rates[place - 1]) == self.share(self.rates[place])

    @cached_property
    def edge(self) -> tuple[float, float]:
        """The last rate that is borne and the first one after it that is not; 0 and inf where there is none."""
        borne = [rate for rate in self.rates if not self.breaks(rate)]
        low = borne[-1] if borne else 0.0
        return low, next((rate for rate in self.rates if rate > low), math.inf)

    @property
    def is_found(self) -> bool:
        """Whether it is known where it breaks: between two rates that stand next to each other."""
        if self.refused:
            return True
        if not self.points:
            return False
        low, high = self.edge
        if low == 0:
            return self.rates[0] == RATES[0]
        return low >= RATES[-1] or high <= next(rate for rate in RATES if rate > low)

    def is_beaten(self, rate: float) -> bool:
        """Whether it is known that it does not bear `rate`."""
        return self.bound < rate or any(self.breaks(one) for one in self.rates if one <= rate)

    @property
    def goodput(self) -> float:
        """Requests a second that it bears: on the line between the two rates of `edge`, and within the bound."""
        low, high = self.edge
        if self.refused or not low:
            return 0.0
        if high == math.inf:
            return low
        before, after = self.share(low), self.share(high)
        if after >= SHARE:  # only the bound says that it is too much
            return min(max(self.bound, low), high)
        part = (before - SHARE) / (before - after)
        return min(low * (high / low) ** part, max(self.bound, low))

    @property
    def per_gpu(self) -> float:
        """Requests a second and GPU that it bears."""
        return self.goodput / self.gpus

    @property
    def cause(self) -> str:
        """What breaks first: "tpot", "ttft" or one of `pools.PARTS`; empty where nothing does."""
        high = self.edge[1]
        return "" if self.refused or high == math.inf else self.cause_at(high)

    def cause_at(self, rate: float) -> str:
        """What breaks at a rate that has been run: why requests are late, or else what would make them so in time."""
        return self.points[rate].cause(self.objective) if self.share(rate) < SHARE else self.bound_by


@dataclass(frozen=True)
class State:
    """Both ways to use the same GPUs, as far as they have been run."""

    rate: float
    model: str
    gpu: str
    link: str
    layer_wise: bool
    budget: int
    work: Work
    objective: Objective
    mine: Side
    both: Side
    """As many GPUs, each of which prefills and decodes; with `budget` TUNED the best one that has been found."""
    is_tuned: bool
    """Whether no other budget is better than that of `both`."""
    splits: tuple[Side, ...]
    """All ways to cut these GPUs into two pools, `mine` among them."""
    transfer: Transfer
    """Of one prompt, alone."""
    error: str | None
    """How far the cost model is off on published measurements; None until it has been asked for."""

    @property
    def known(self) -> bool:
        """Whether it is known what becomes of this rate, and where both ways break."""
        if self.mine.refused:
            return True
        return self.rate in self.mine.points and self.mine.is_found and self.is_tuned

    @property
    def complete(self) -> bool:
        """Whether every split's edge is known too."""
        return self.known and all(side.is_found for side in self.splits)

    @property
    def best(self) -> Side:
        """The split that bears most."""
        return max(self.splits, key=lambda side: side.goodput)

    @property
    def gain(self) -> float:
        """How many times what the GPUs bear that do both; inf where those bear nothing."""
        if not self.both.goodput:
            return math.inf if self.mine.goodput else 1.0
        return self.mine.goodput / self.both.goodput


class Experiment:
    """All runs of one way to use the GPUs. What has been run is kept, and a run that was left is taken up again."""

    def __init__(self, system: Disaggregated | Colocated, work: Work) -> None:
        self.system, self.work, self.runs = system, work, Runs(self._run)
        self.prefill, self.budget = (system.prefill, 0) if isinstance(system, Disaggregated) else (0, system.budget)
        self.refused = ""
        self._sides: dict[Objective, Side] = {}
        try:
            system.bound(work, Objective(1.0, 1.0))
        except MinivllmError as error:
            self.refused = str(error)

    def _run(self, rate: float) -> Generator[None, None, Served]:
        if isinstance(self.system, Disaggregated) and self.system.connector:
            return patient(self.system.serve(self.work, rate), "your connector")
        return self.system.serve(self.work, rate)

    def _bound(self, objective: Objective) -> tuple[float, str]:
        return self.system.bound(self.work, objective), self.system.bound_by(self.work, objective)

    def side(self, objective: Objective) -> Side:
        """What is known by now."""
        last, found = self._sides.get(objective), self.runs.found
        if last is None:
            bound, bound_by = (0.0, "") if self.refused else self._bound(objective)
            last = Side(self.prefill, self.system.gpus, {}, objective, bound, bound_by, self.budget, self.refused)
        if len(last.points) < len(found):
            last = replace(last, points=dict(found))
        self._sides[objective] = last
        return last


@lru_cache(maxsize=512)
def experiment(key: Hashable, work: Work) -> Experiment:
    """The runs of a configuration, those done before included; `key` is what `_systems` makes of the knobs."""
    assert isinstance(key, tuple)
    model, gpu, prefill, decode, *rest = key
    if prefill:
        link, layer_wise, *own = rest
        connector = partial(CheckedConnector, make=own[0]) if own else None
        system = Disaggregated(
            known_model(model), get_hardware(gpu), prefill, decode, get_link(link), layer_wise, connector=connector
        )
    else:
        system = Colocated(known_model(model), get_hardware(gpu), decode, rest[0])
    return Experiment(system, work)


def sweep(
    rate: float = START["rate"],
    prefill: int = START["prefill"],
    decode: int = START["decode"],
    link: str = START["link"],
    layer_wise: bool = START["layer_wise"],
    ttft: float = START["ttft"],
    tpot: float = START["tpot"],
    budget: int = START["budget"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    prompt: int = START["prompt"],
    output: int = START["output"],
    connector: ConnectorScheduler | None = None,
) -> Iterator[State]:
    """Serve requests in two pools, and by as many GPUs that do both; each state knows more of the curves.

    Args:
        rate: requests a second over all GPUs: where the reader stands.
        prefill, decode: GPUs that compute prompts, and that generate.
        link: one of `kv_links.LINKS`, of each GPU.
        layer_wise: a layer is sent as soon as it is computed.
        ttft, tpot: seconds to the first token, and per token after it, that 90 % of the requests must have.
        budget: tokens in a step of the GPUs that do both (chunked prefill); TUNED: the best of LADDER.
        model, gpu: names of `known_models` and `hardware`.
        prompt, output: tokens of each request.
        connector: the reader's own scheduler side, as in exercise 08, in each engine of the two pools.

    Raises:
        MinivllmError: a value makes no sense, or the reader's connector loses a transfer.
    """
    require_numbers(
        MOST, rate=rate, prefill=prefill, decode=decode, prompt=prompt, output=output, budget=budget, ttft=ttft,
        tpot=tpot,
    )  # fmt: skip
    sensible = min(rate, ttft, tpot) > 0 and min(prompt, output, prefill, decode) >= 1 and budget >= TUNED
    require(
        sensible,
        f"rate, ttft and tpot are above 0, prefill, decode, prompt and output 1 at least, and budget 0 or more; "
        f"rate is {rate}, ttft {ttft}, tpot {tpot}, prefill {prefill}, decode {decode}, prompt {prompt}, "
        f"output {output}, budget {budget}",
    )
    for name, value in (("model", model), ("gpu", gpu), ("link", link)):
        require(isinstance(value, str), f"{name} is a name, not {value!r}")
    require(isinstance(layer_wise, bool), f"layer_wise is True or False, not {layer_wise!r}")
    work, gpus, many = Work(prompt, output, counted=COUNTED), (model, gpu), prefill + decode
    linked = (link, layer_wise, connector) if connector else (link, layer_wise)
    splits = [experiment((*gpus, one, many - one, *linked), work) for one in range(1, many)]
    pools = [experiment((*gpus, 0, many, one), work) for one in ([budget] if budget else LADDER)]
    if not pools[0].refused:
        likely = likely_first(pools[0].system.step_cost, LADDER, Objective(ttft, tpot))
        pools.sort(key=lambda one: likely.index(one.budget) if one.budget in likely else 0)
    first = State(
        rate=rate, model=model, gpu=gpu, link=link, layer_wise=layer_wise, budget=budget, work=work,
        objective=Objective(ttft, tpot), mine=splits[prefill - 1].side(Objective(ttft, tpot)),
        both=pools[0].side(Objective(ttft, tpot)), is_tuned=False, splits=(), error=None,
        transfer=Transfer.of(known_model(model), get_hardware(gpu), prompt, LINKS[link]),
    )  # fmt: skip
    return _Sweep(first, splits, pools).states()


@dataclass(frozen=True)
class _Sweep:
    """A sweep under way."""

    first: State
    splits: Sequence[Experiment]
    pools: Sequence[Experiment]
    """GPUs that do both, by budget: the likely best one first."""

    def states(self) -> Iterator[State]:
        """Ever more complete states: here first, then where both ways break, the other splits, and other rates."""
        state = self._now()
        yield state
        known = self._known()
        for wanted in self._wanted():
            for _ in wanted:
                yield state
            if self._known() > known:
                known, state = self._known(), self._now()
                yield state

    @property
    def mine(self) -> Experiment:
        return self.splits[self.first.mine.prefill - 1]

    def _known(self) -> int:
        return sum(len(one.runs.found) for one in (*self.splits, *self.pools))

    def _wanted(self) -> Iterator[Iterator[None]]:
        """Runs that are still to be done, one after another."""
        if self.mine.refused:
            return
        rate = self.first.rate
        yield self.mine.runs.run(rate)
        known_error("decode", "prefill")
        yield self.pools[0].runs.run(rate)
        yield from self._edge(self.mine)
        for one in self.pools:
            best = self._both().edge[0]
            if best and not self._side(one).is_beaten(best):
                yield one.runs.run(best)
            if not self._side(one).is_beaten(best):
                yield from self._edge(one)
        for one in self.splits:
            yield from self._edge(one)
        both = next(one for one in self.pools if one.budget == self._both().budget)
        goodput = max(self._side(one).goodput for one in (self.mine, both))
        near = [other for other in RATES if goodput / 2 <= other <= 1.5 * goodput]
        for other in (RATES[0], *sorted(near, key=lambda other: abs(math.log(other / rate)))):
            for one in (self.mine, both):
                if not self._side(one).is_flat_at(other):
                    yield one.runs.run(other)

    def _edge(self, one: Experiment) -> Iterator[Iterator[None]]:
        """Runs until it is known where it breaks."""
        while (next_rate := self._next(one)) is not None:
            yield one.runs.run(next_rate)

    def _both(self) -> Side:
        """The best budget's side of those whose edge is known; the first one's as long as none is."""
        found = [side for one in self.pools if (side := self._side(one)).is_found]
        return max(found, key=lambda side: side.goodput, default=self._side(self.pools[0]))

    def _is_tuned(self, best: Side) -> bool:
        rate = best.edge[0] or RATES[0]
        return best.is_found and all((side := self._side(one)).is_found or side.is_beaten(rate) for one in self.pools)

    def _next(self, one: Experiment) -> float | None:
        """The rate to try next in search of where it breaks; None when it is found."""
        side = self._side(one)
        if side.is_found:
            return None
        low, high = side.edge
        if not side.points or (low == 0 and high == math.inf):
            return max((rate for rate in RATES if rate <= 0.8 * side.bound), default=RATES[0])
        inside = [rate for rate in RATES if low < rate < min(high, max(1.5 * side.bound, low * 1.6))]
        return inside[len(inside) // 2] if inside else next(rate for rate in RATES if rate > low)

    def _side(self, one: Experiment) -> Side:
        return one.side(self.first.objective)

    def _now(self) -> State:
        splits = tuple(self._side(one) for one in self.splits)
        error = known_error("decode", "prefill") if published_checks.cache_info().currsize else None
        mine, both = splits[self.first.mine.prefill - 1], self._both()
        return replace(self.first, mine=mine, both=both, is_tuned=self._is_tuned(both), splits=splits, error=error)
