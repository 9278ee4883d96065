"""A sweep finds the edge where a system breaks before it fills in the curve."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from minivllm_simulate.load_sweep import Runs, Span
from widgets.shell.swept import Sweep, SweptState

VALUES = tuple(2**power for power in range(12))
START = 32


@dataclass(frozen=True, kw_only=True)
class State(SweptState[bool]):
    KNOB = "size"
    VALUES = VALUES
    size: int

    def causes(self, value: int) -> list[str]:
        return ["queue"] * self.points[value]

    @property
    def stopped(self) -> list[Span]:
        return []


class Experiment:
    """Breaks below `edge`, and does not start at the `refused` values."""

    def __init__(self, edge: int, refused: tuple[int, ...] = ()) -> None:
        self.edge, self.refused = edge, refused
        self.order: list[int] = []
        self.runs: Runs[int, bool] = Runs(self._run)

    def _run(self, value: int) -> Generator[None, None, bool]:
        self.order.append(value)
        yield
        return value < self.edge

    def refusal(self, value: int, /) -> str:
        return "too large" if value in self.refused else ""

    def swept(self) -> list[State]:
        return list(Sweep(lambda _, **known: State(size=START, **known), self, None, START, VALUES).states())


@pytest.mark.parametrize("edge", VALUES[1:])
def test_the_readers_value_comes_first_then_the_edge_and_then_all_others(edge: int):
    experiment = Experiment(edge)
    last = experiment.swept()[-1]
    assert experiment.order[0] == START
    known = max(experiment.order.index(value) for value in (edge // 2, edge))
    assert known <= 6, "both ends, and four halvings of twelve values"
    assert sorted(experiment.order) == [*VALUES]
    assert last.complete
    assert last.queue_at(edge)
    assert not last.queue_at(2 * edge + 1)
    assert not last.queue_at(None)


@pytest.mark.parametrize("refused", [VALUES[-3:], (START, *VALUES[-3:]), VALUES])
def test_values_with_which_nothing_starts_are_not_run(refused: tuple[int, ...]):
    experiment = Experiment(8, refused)
    assert experiment.swept()[-1].complete
    assert sorted(experiment.order) == [value for value in VALUES if value not in refused]


def test_a_curve_that_never_breaks_is_filled_in_from_the_readers_value_outwards():
    experiment = Experiment(0)
    experiment.swept()
    assert experiment.order[:3] == [START, VALUES[-1], VALUES[0]]
    distances = [abs(value.bit_length() - START.bit_length()) for value in experiment.order[3:]]
    assert all(near <= far for near, far in pairwise(distances))
