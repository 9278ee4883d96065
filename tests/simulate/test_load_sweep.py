"""Runs that are paused and resumed, and where a curve crosses its limit."""

import math

import pytest
from refusals import assert_refused

from minivllm.errors import MinivllmError
from minivllm_simulate.load_sweep import Runs, crossing, share_within, within


def counting(begun: list):
    def start(key: int):
        begun.append(key)
        for _ in range(3):
            yield
        return 10 * key

    return Runs(start)


def test_a_run_that_was_left_goes_on_where_it_paused():
    begun: list[int] = []
    runs = counting(begun)
    for _ in range(3):
        next(runs.run(4))  # each caller leaves after one pause
    assert runs.found == {}
    assert list(runs.run(4)) == []
    assert (runs.found, begun) == ({4: 40}, [4])
    assert list(runs.run(4)) == []


def test_two_callers_share_a_run_and_neither_loses_it():
    begun: list[int] = []
    runs = counting(begun)
    first, second = runs.run(1), runs.run(1)
    next(first)
    assert len(list(second)) == 2
    assert list(first) == []
    assert (runs.found, begun) == ({1: 10}, [1])


def test_a_run_that_failed_begins_again():
    tries = []

    def start(key: str):
        tries.append(key)
        yield
        if len(tries) == 1:
            raise MinivllmError("once")
        return key

    runs = Runs(start)
    assert_refused("once", list, runs.run("a"))
    assert len(list(runs.run("a"))) == 1
    assert runs.found == {"a": "a"}


def test_a_crossing_lies_between_two_loads_and_is_the_last_one():
    assert crossing([1, 2], [1, 100], 10) == pytest.approx(1.5)
    assert crossing([1, 100], [1, 100], 10, log=True) == pytest.approx(10)
    assert crossing([1, 2, 3, 4], [1, 100, 1, 100], 10) == pytest.approx(3.5)
    assert crossing([1, 2], [20, 30], 10) == 1
    assert crossing([1, 2], [5, 10], 10) == math.inf
    assert crossing([], [], 10) == math.inf


def test_a_looser_limit_never_lowers_a_crossing():
    values = [1, 3, 2, 8, 5, 40, 90]
    results = [crossing(range(1, 8), values, limit) for limit in range(1, 100)]
    assert results == sorted(results)


def test_shares_of_ordered_values():
    values = list(range(1, 101))
    assert (within(values, 0.5), within(values, 0.99), within(values, 1.0), within([7], 0.01)) == (50, 99, 100, 7)
    assert share_within(values, 95) == 0.95
