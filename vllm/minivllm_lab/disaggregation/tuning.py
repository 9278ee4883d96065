"""The best that each side can do: one pool with its best token budget, two pools with their best
split. *Modelled*.

    best_budget(Colocated(model, gpu, 4), Work(1024, 128), Objective(0.2, 0.0075)).name   # tokens of a step
    best_split(Disaggregated(model, gpu, 1, 3, link), work, objective).goodput.per_gpu

A comparison with an untuned budget only says how bad that budget is. So every setting of a ladder
is tried on the same rates, and one that cannot sustain the next rate above the best so far is out
after a single run.

`winning_budgets` are those with which one pool sustains as much as two. `MixingCost` adds what the
roofline leaves out of a step in which prompts and answers meet; `break_even` finds how much of it
one pool can take before two are better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from minivllm_lab.disaggregation.goodput import SHARE, Colocated, Disaggregated, Goodput, Objective, System, Work
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.open_load import finished

BUDGETS = (*range(64, 513, 64), 640, 768, 896, 1024, 1536, 2048, 4096, 8192)
"""Token budgets that are tried: up to 512 every multiple of 64, since goodput falls steeply
beside the best.
"""
ROUNDS = 7


class Best(NamedTuple):
    """The setting with the highest goodput, and that goodput."""

    name: str
    goodput: Goodput


def best_of(systems: Mapping[str, System], work: Work, objective: Objective, rounds: int = ROUNDS) -> Best:
    """Return the best of some systems with the same number of GPUs, to within the highest bound / 2
    ** `rounds`.

    Put the system that is likely best first: then each of the others costs only one run.
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
    """Return the best token budget of one pool, with the budget as its name; `pool.budget` is
    ignored.
    """
    budgets = likely_first(pool.step_cost, BUDGETS, objective)
    return best_of({str(each): replace(pool, budget=each) for each in budgets}, work, objective, rounds)


def best_split(pools: Disaggregated, work: Work, objective: Objective, rounds: int = ROUNDS) -> Best:
    """Return the best split of the GPUs into two pools; its name is "prefill:decode"."""
    gpus = pools.gpus
    splits = {f"{n}:{gpus - n}": replace(pools, prefill=n, decode=gpus - n) for n in range(1, gpus)}
    likely = sorted(splits, key=lambda name: -splits[name].bound(work, objective))
    return best_of({name: splits[name] for name in likely}, work, objective, rounds)


def likely_first(cost: Cost, budgets: Iterable[int], objective: Objective) -> list[int]:
    """Sort budgets by how near they are to the largest one whose full step lasts no longer than
    a token may take.
    """
    ladder = sorted(budgets)
    short = [budget for budget in ladder if cost.seconds(StepShape.of([(budget, 0)])) <= objective.tpot]
    guess = short[-1] if short else ladder[0]
    return sorted(ladder, key=lambda budget: abs(math.log(budget / guess)))


class MixingCost(NamedTuple):
    """A step's cost, with `extra` seconds where prompt tokens and answers are computed in the
    same step.
    """

    cost: Cost
    extra: float

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step. A step is mixed if it has several requests and more tokens
        than requests.
        """
        is_mixed = shape.num_tokens > shape.num_reqs > 1
        return self.cost.seconds(shape) + (self.extra if is_mixed else 0.0)


def winning_budgets(
    pool: Colocated, rate: float, work: Work, objective: Objective, budgets: Iterable[int] = BUDGETS
) -> list[int]:
    """Return those of `budgets` with which the pool sustains `rate`."""
    pools = {budget: replace(pool, budget=budget) for budget in budgets}
    able = {budget: each for budget, each in pools.items() if rate <= each.bound(work, objective)}
    served = {budget: finished(each.serve(work, rate)) for budget, each in able.items()}
    return [budget for budget, each in served.items() if each.attainment(objective) >= SHARE]


def break_even(pool: Colocated, rate: float, work: Work, objective: Objective, rounds: int = 6) -> float:
    """Return the highest mixing cost, in seconds, at which a pool, tuned again for each cost, still
    sustains `rate`.

    The result is at most `objective.tpot`, 0 if the pool does not sustain the rate even without
    extra cost, and too low by at most `objective.tpot` / 2 ** `rounds`. A budget that loses at some
    cost loses at any higher one, so it is not tried again.
    """
    low, high = 0.0, objective.tpot
    winning = winning_budgets(pool, rate, work, objective)
    for _ in range(rounds if winning else 0):
        middle = (low + high) / 2
        mixed = replace(pool, cost=MixingCost(pool.step_cost, middle))
        still = winning_budgets(mixed, rate, work, objective, winning)
        low, high, winning = (middle, high, still) if still else (low, middle, winning)
    return low
