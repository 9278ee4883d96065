"""The best that each side can do: one pool with its best token budget, two pools with their best split. *Modelled*.

    best_budget(Colocated(model, gpu, 4), Work(1024, 128), Objective(0.2, 0.0075)).name   # tokens of a step
    best_split(Disaggregated(model, gpu, 1, 3, link), work, objective).goodput.per_gpu

A comparison with a budget that was not tuned says how bad that budget is. So every setting of a ladder is tried on the
same rates. A setting that cannot sustain the next rate above the best one so far is out after a single run.

`winning_budgets` are those with which one pool sustains as much as two. `MixingCost` adds what the roofline leaves out
of a step in which prompts and answers meet; `break_even` finds how much of it one pool can take before two are better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from minivllm_lab.disaggregation.goodput import (
    SHARE,
    Colocated,
    Disaggregated,
    Goodput,
    Objective,
    System,
    Work,
)
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.open_load import finished

BUDGETS = (*range(64, 513, 64), 640, 768, 896, 1024, 1536, 2048, 4096, 8192)
"""Token budgets that are tried: up to 512 every multiple of 64, since goodput falls steeply beside the best."""
ROUNDS = 7


@dataclass(frozen=True)
class Best:
    """The setting that sustains most, and what that is."""

    name: str
    goodput: Goodput


def best_of(systems: Mapping[str, System], work: Work, objective: Objective, rounds: int = ROUNDS) -> Best:
    """Return the best of some systems with equally many GPUs, to the highest bound / 2 ** `rounds`.

    The likely best one should come first: then each of the others costs one run.
    """
    bounds = {name: system.bound(work, objective) for name, system in systems.items()}
    name, gpus = next((name, system.gpus) for name, system in systems.items())
    top, best, rate = 2**rounds, 0, max(bounds.values()) / 2**rounds
    causes: dict[str, str] = {}
    for other, system in systems.items():

        def sustains(place: int, system: System = system, other: str = other) -> bool:
            if place * rate > bounds[other]:
                causes[other] = system.bound_by(work, objective)
                return False
            served = finished(system.serve(work, place * rate))
            if served.attainment(objective) >= SHARE:
                return True
            causes[other] = served.cause(objective)
            return False

        if best == top or not sustains(best + 1):
            continue
        low, high = best + 1, top + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sustains(middle) else (low, middle)
        name, best = other, low
    return Best(name, Goodput(best * rate, gpus, causes.get(name, "")))


def best_budget(pool: Colocated, work: Work, objective: Objective, rounds: int = ROUNDS) -> Best:
    """Return the best token budget of one pool; its name is the budget. `pool.budget` is not looked at."""
    budgets = likely_first(pool.step_cost, BUDGETS, objective)
    return best_of({str(one): replace(pool, budget=one) for one in budgets}, work, objective, rounds)


def best_split(pools: Disaggregated, work: Work, objective: Objective, rounds: int = ROUNDS) -> Best:
    """Return the best split of the GPUs into two pools; its name is "prefill:decode"."""
    many = pools.gpus
    splits = {f"{one}:{many - one}": replace(pools, prefill=one, decode=many - one) for one in range(1, many)}
    likely = sorted(splits, key=lambda name: -splits[name].bound(work, objective))
    return best_of({name: splits[name] for name in likely}, work, objective, rounds)


def likely_first(cost: Cost, budgets: Iterable[int], objective: Objective) -> list[int]:
    """Sort budgets by how near they are to the largest one whose full step lasts no longer than a token may take."""
    ladder = sorted(budgets)
    short = [one for one in ladder if cost.seconds(StepShape.of([(one, 0)])) <= objective.tpot]
    guess = short[-1] if short else ladder[0]
    return sorted(ladder, key=lambda one: abs(math.log(one / guess)))


@dataclass(frozen=True)
class MixingCost:
    """A step's cost, and so many seconds more where prompt tokens and answers are computed in the same step."""

    cost: Cost
    extra: float

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step of this shape. More tokens than requests, of several requests: they are mixed."""
        is_mixed = shape.num_tokens > shape.num_reqs > 1
        return self.cost.seconds(shape) + (self.extra if is_mixed else 0.0)


def winning_budgets(
    pool: Colocated, rate: float, work: Work, objective: Objective, budgets: Iterable[int] = BUDGETS
) -> list[int]:
    """Return those of `budgets` with which the pool sustains `rate`."""
    pools = {one: replace(pool, budget=one) for one in budgets}
    able = {one: each for one, each in pools.items() if rate <= each.bound(work, objective)}
    return [one for one, each in able.items() if finished(each.serve(work, rate)).attainment(objective) >= SHARE]


def break_even(pool: Colocated, rate: float, work: Work, objective: Objective, rounds: int = 6) -> float:
    """Return the most seconds of `MixingCost` with which a pool, tuned anew each time, still sustains `rate`.

    It is `objective.tpot` at most, 0 where the pool does not even without, and too low by `objective.tpot` /
    2 ** `rounds` at most. A budget that loses at some cost loses at any higher one, so it is not tried again.
    """
    low, high = 0.0, objective.tpot
    winning = winning_budgets(pool, rate, work, objective)
    for _ in range(rounds if winning else 0):
        middle = (low + high) / 2
        mixed = replace(pool, cost=MixingCost(pool.step_cost, middle))
        still = winning_budgets(mixed, rate, work, objective, winning)
        low, high, winning = (middle, high, still) if still else (low, middle, winning)
    return low
