"""Test that the faster form of a linear is chosen, by a clock that a test can control."""

import inspect
import itertools
import math
import time

import pytest
import torch
from refusals import assert_refused

pytest.importorskip("numba", reason="panels are numba's; a GPU's image has none")

from minivllm.kernels.cpu import linear_choice
from minivllm.kernels.cpu.linear_choice import ROWS, best_threshold, measure, most_rows_in_panels


@pytest.mark.parametrize(
    ("panels", "plain", "most_rows"),
    [
        ((1, 1, 1, 1), (2, 2, 2, 2), math.inf),
        ((2, 2, 2, 2), (1, 1, 1, 1), 0),
        ((1, 1, 3, 3), (2, 2, 1, 1), 23),  # between 8 and 64
        ((1, 3, 3, 3), (2, 1, 1, 1), 3),  # between 1 and 8
        ((1, 1, 1, 1.1), (2, 2, 2, 1), math.inf),  # 2 % in the mean do not pay for two layouts
        ((1, 1, 1, 1.5), (2, 2, 2, 1), 128),
        ((1.3, 2, 2, 2), (1, 1, 1, 1), 0),
    ],
)
def test_the_faster_form_is_taken_and_both_only_where_that_pays(panels, plain, most_rows):
    seconds = dict(zip(ROWS, zip(panels, plain, strict=True), strict=True))
    assert best_threshold(seconds) == most_rows


def test_both_forms_are_timed_by_the_processor_time_of_one_thread(monkeypatch):
    monkeypatch.delenv(linear_choice.SETTING, raising=False)
    threads = torch.get_num_threads()
    during = []

    def measured(weight, gated):
        during.append(torch.get_num_threads())
        return measure(weight, gated)

    monkeypatch.setattr(linear_choice, "measure", measured)
    linear_choice._measured.cache_clear()
    most_rows_in_panels(torch.zeros(64, 32), False)
    linear_choice._measured.cache_clear()
    assert during == [1]
    assert torch.get_num_threads() == threads
    assert inspect.signature(measure).parameters["clock"].default is time.thread_time


class Clock:
    """A clock that only the forms move: a call with some rows takes `seconds(rows)`."""

    def __init__(self, monkeypatch, panels, plain) -> None:
        self.now = 0.0
        multiply, multiply_panels = linear_choice.F.linear, linear_choice.PanelLinear.__call__

        def in_panels(linear, x):
            self.now += panels(len(x))
            return multiply_panels(linear, x)

        def in_torch(x, weight, bias=None):
            self.now += plain(len(x))
            return multiply(x, weight, bias)

        monkeypatch.setattr(linear_choice.PanelLinear, "__call__", in_panels)
        monkeypatch.setattr(linear_choice.F, "linear", in_torch)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("panels", "plain", "most_rows"),
    [
        (lambda rows: 1e-6 * rows, lambda rows: 2e-6 * rows, math.inf),
        (lambda rows: 2e-6 * rows, lambda rows: 1e-6 * rows, 0),
        (lambda rows: 1e-6 * rows, lambda rows: 2e-5 + 2e-7 * rows, 23),  # matrix units: many rows at once
    ],
)
def test_what_is_measured_is_what_is_taken(monkeypatch, panels, plain, most_rows):
    clock = Clock(monkeypatch, panels, plain)
    seconds = measure(torch.zeros(32, 32), False, clock)
    assert seconds == {rows: pytest.approx((panels(rows), plain(rows))) for rows in ROWS}
    assert best_threshold(seconds) == most_rows


def test_sizes_that_would_take_too_long_are_left_out(monkeypatch):
    clock = Clock(monkeypatch, lambda rows: 1e-3 * rows, lambda rows: 2e-3 * rows)
    assert list(measure(torch.zeros(32, 32), False, clock)) == [1, 8]
    assert clock.now < 0.2


def test_a_shape_is_measured_once_and_the_setting_makes_the_choice_instead(monkeypatch):
    monkeypatch.delenv(linear_choice.SETTING, raising=False)
    calls = itertools.count()
    monkeypatch.setattr(linear_choice, "measure", lambda *_: {1: (1.0, 2.0 + next(calls))})
    linear_choice._measured.cache_clear()
    weight = torch.zeros(48, 32)
    for _ in range(3):
        assert most_rows_in_panels(weight, False) == math.inf
    assert next(calls) == 1
    monkeypatch.setenv(linear_choice.SETTING, "torch")
    assert most_rows_in_panels(weight, False) == 0
    monkeypatch.setenv(linear_choice.SETTING, "panels")
    assert most_rows_in_panels(weight, False) == math.inf
    assert most_rows_in_panels(weight.to(torch.float16), False) == 0, "panels have no fp16"
    monkeypatch.setenv(linear_choice.SETTING, "amx")
    assert_refused('is \'amx\'; it must be "auto", "panels" or "torch"', most_rows_in_panels, weight, False)
    linear_choice._measured.cache_clear()
