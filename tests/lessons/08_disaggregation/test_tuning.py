"""The best budget and the best split are those of a full search, and the edge is where both sides
are equal.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from minivllm_lab.disaggregation import tuning
from minivllm_lab.disaggregation.goodput import Client, Colocated, Disaggregated, Objective, Served, Work, goodput
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import get_link

LLAMA, H100 = known_model("Llama-3.1-8B"), get_hardware("H100")
LEVEL, WORK = Objective(0.5, 0.01), Work(64, 8, counted=4)


@dataclass(frozen=True)
class PerToken:
    """A cost model in which a step takes a fixed time for each token."""

    each: float = 1e-5

    def seconds(self, shape: StepShape) -> float:
        return self.each * shape.num_tokens


@dataclass(frozen=True)
class Pool:
    """A pool that sustains its budget in requests per second if a step with that many tokens is
    short enough, else none.
    """

    budget: int = 0
    cost: PerToken | tuning.MixingCost = PerToken()
    gpus: int = 4

    @property
    def step_cost(self) -> PerToken | tuning.MixingCost:
        return self.cost

    def serve(self, work: Work, rate: float) -> Generator[None, None, Served]:
        yield
        is_short = self.cost.seconds(StepShape(2, self.budget, 0, 0)) <= LEVEL.tpot
        seconds = 0.0 if is_short and rate <= self.budget else math.inf
        return Served(rate, [Client(seconds, seconds)])

    def bound(self, work: Work, objective: Objective) -> float:
        return 8192.0

    def bound_by(self, work: Work, objective: Objective) -> str:
        return "ttft"


@pytest.mark.parametrize("order", [1, -1])
def test_the_best_is_found_whatever_comes_first(order: int):
    systems: Any = {str(budget): Pool(budget) for budget in tuning.BUDGETS[::order]}
    best = tuning.best_of(systems, WORK, LEVEL)
    assert best.name == "896"  # 1,024 tokens take longer than a token may
    assert best.goodput.rate == 896
    assert best.goodput.cause


def test_where_nothing_is_sustained_the_best_is_nothing():
    systems: Any = {"64": Pool(64, PerToken(1.0))}
    assert tuning.best_of(systems, WORK, LEVEL).goodput.rate == 0


def test_budgets_that_fill_the_time_of_a_token_come_first():
    assert tuning.likely_first(PerToken(), tuning.BUDGETS, LEVEL)[:3] == [896, 1024, 768]
    assert sorted(tuning.likely_first(PerToken(), tuning.BUDGETS, LEVEL)) == list(tuning.BUDGETS)


def test_the_budgets_that_win_and_the_cost_at_which_the_last_one_does_not():
    """448 tokens take 4.48 ms of the 10 that a token may take, so a mixed step may cost 5.52 ms
    more.
    """
    pool: Any = Pool()
    assert tuning.winning_budgets(pool, 400, WORK, LEVEL) == [448, 512, 640, 768, 896]
    assert tuning.break_even(pool, 400, WORK, LEVEL, rounds=10) == pytest.approx(5.52e-3, abs=1e-5)
    assert tuning.break_even(pool, 1000, WORK, LEVEL) == 0


def test_only_steps_that_mix_prompts_and_answers_cost_more():
    cost = tuning.MixingCost(PerToken(), 1.0)
    answers, prompt, mixed = StepShape(4, 4, 0, 0), StepShape(1, 100, 0, 0), StepShape(5, 104, 0, 0)
    assert [cost.seconds(shape) > 1 for shape in (answers, prompt, mixed)] == [False, False, True]


def test_one_pool_wins_with_its_best_budget_and_loses_with_the_default():
    """The lesson's claim is tested with the same four GPUs and requests; only the budget differs."""
    work, level = Work(1024, 128, counted=12), Objective(0.5, 0.0075)
    pool, two = Colocated(LLAMA, H100, 4), Disaggregated(LLAMA, H100, 1, 3, get_link("400 Gb/s"), layer_wise=True)
    tuned, split = tuning.best_budget(pool, work, level, 4), tuning.best_split(two, work, level, 4)
    default = goodput(Colocated(LLAMA, H100, 4, 8192), work, level, 4)
    assert tuned.goodput.rate > 1.2 * split.goodput.rate
    assert split.goodput.rate > 1.2 * default.rate
