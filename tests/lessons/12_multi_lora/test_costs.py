"""The traffic of many adapters and its cost, compared with draws, with the real slots, and with
counts by hand.
"""

import random

import pytest

from minivllm_lab.multi_lora import costs
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model


def test_shares_fall_as_zipf_says_and_draws_follow_them():
    assert costs.zipf_shares(4, 0.0) == [0.25] * 4
    shares = costs.zipf_shares(3, 1.0)
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    drawn = costs.zipf_adapters(3, 1.0, 20_000, seed=1)
    assert [drawn.count(each) / 20_000 for each in (1, 2, 3)] == pytest.approx(shares, abs=0.01)
    assert costs.zipf_adapters(3, 1.0, 50, seed=1) == drawn[:50] != costs.zipf_adapters(3, 1.0, 50, seed=2)


@pytest.mark.parametrize(("adapters", "skew", "running"), [(10, 0.0, 5), (200, 1.0, 40), (1000, 0.8, 100)])
def test_distinct_adapters_are_those_of_poisson_draws(adapters: int, skew: float, running: int):
    shares, draw = costs.zipf_shares(adapters, skew), random.Random(3)
    counts = []
    for _ in range(1000):
        total, clock = 0, draw.expovariate(1)
        while clock < running:
            total, clock = total + 1, clock + draw.expovariate(1)
        counts.append(len(set(draw.choices(range(adapters), shares, k=total))))
    assert sum(counts) / 1000 == pytest.approx(costs.distinct_adapters(shares, running), rel=0.04)


def waits(adapters: int, skew: float, slots: int, load: float, requests: int) -> list[float]:
    """Return the sorted waits for a slot of requests that each run for a second."""
    draw, now, result = random.Random(5), 0.0, []
    ends: dict[int, float] = {}  # when the last request of each adapter with a slot ends
    queue: dict[int, list[float]] = {}  # arrivals of waiting requests by adapter, oldest adapter first
    for adapter in costs.zipf_adapters(adapters, skew, requests, seed=5):
        now += draw.expovariate(load)
        while ends and (over := min(ends.values())) <= now:
            del ends[next(each for each, end in ends.items() if end == over)]
            if queue:
                first = next(iter(queue))
                result += [over - came for came in queue.pop(first)]
                ends[first] = over + 1
        if adapter in ends or len(ends) < slots:
            ends[adapter] = now + 1
            result.append(0.0)
        else:
            queue.setdefault(adapter, []).append(now)
    return sorted(result)


@pytest.mark.parametrize(
    ("adapters", "skew", "slots", "load"),
    [(1000, 1.0, 8, 20.0), (1000, 1.0, 12, 20.0), (1000, 0.0, 12, 20.0), (50, 1.0, 4, 10.0), (10, 0.0, 2, 20.0)],
)
def test_the_wait_for_a_slot_is_that_of_a_long_queue(adapters: int, skew: float, slots: int, load: float):
    result = waits(adapters, skew, slots, load, 12_000)
    formula = costs.wait_for_a_slot(costs.zipf_shares(adapters, skew), load, 1.0, slots, 0.9)
    assert 0.7 * result[int(0.9 * len(result))] < formula < 1.1 * result[int(0.9 * len(result))]


def test_waits_are_short_with_a_slot_for_each_adapter_in_use():
    shares = costs.zipf_shares(1000, 1.0)
    wanted = costs.distinct_adapters(shares, 20.0)
    assert costs.wait_for_a_slot(shares, 20.0, 1.0, round(wanted + 1), 0.9) == 0
    assert waits(1000, 1.0, round(2 * wanted), 20.0, 5_000)[4_500] == 0


class Flat:
    """A cost model in which a step without adapters takes 5 ms."""

    def seconds(self, shape: StepShape) -> float:
        return 0.005


DECODES = StepShape.of([(1, 100)] * 8)


def test_costs_are_launches_until_bytes_take_longer():
    cost = costs.AdapterCost(Flat(), known_model("Llama-3.1-8B"), get_hardware("H100"), 16)
    sums = 2 * (8192 + 5120) + 3 * (4096 + 14336)
    assert cost.slot_bytes == 2 * 16 * 32 * sums
    assert cost.flops_per_token == 2 * 16 * 32 * sums
    assert cost.launches == 2 * 4 * 32
    launches = 256 * costs.LAUNCH_SECONDS
    assert cost.seconds(DECODES, 0) == 0.005
    assert cost.seconds(DECODES, 3) == pytest.approx(0.005 + launches)
    assert cost.loop_seconds(DECODES, 3) == pytest.approx(0.005 + 3 * launches)
    many = cost.seconds(DECODES, 200) - 0.005
    assert many == pytest.approx((200 * cost.slot_bytes + 8 * cost.row_bytes) / (3.35e12 * 0.9))
    assert many > launches
    assert cost.load_seconds(8) == pytest.approx(cost.slot_bytes / 2 / (64e9 * 0.9))


def test_the_bytes_of_a_step_by_hand():
    cost = costs.AdapterCost(Flat(), known_model("Llama-3.1-8B"), get_hardware("H100"), 8)
    inputs, outputs = 3 * 4096 + 14336, 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert cost.row_bytes == 32 * (2 * (inputs + 2 * outputs) + 2 * 4 * 8 * 7)


def test_a_long_prefill_is_bound_by_its_arithmetic():
    cost = costs.AdapterCost(Flat(), known_model("Llama-3.1-8B"), get_hardware("H100"), 512)
    chunk = StepShape.of([(8192, 0)])
    assert cost.seconds(chunk, 1) - 0.005 == pytest.approx(8192 * cost.flops_per_token / (989.4e12 * 0.64))
