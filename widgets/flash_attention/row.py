"""Sum one row of scores tile by tile, with our online softmax or with the reader's
`softmax_step`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import MinivllmError
from minivllm_lab.checks.bounded import bounded
from minivllm_lab.flash_attention.online_softmax import RunningSoftmax, online_softmax

ROW = Path(__file__).with_name("attention_row.json")
PATIENCE = 1.0
"""CPU seconds that one call of the reader's function may take."""
CLOSE = 1e-4
"""The largest relative error of a right number."""


@dataclass(frozen=True)
class Row:
    """One query's scores and the values of their keys, as the embedded model computed them."""

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """Three numbers of each value."""
    layer: int
    head: int


@dataclass(frozen=True)
class Step:
    """The change that one tile of keys makes to the running softmax."""

    first: int
    """The tile's first key."""
    end: int
    """The key after its last."""
    got: RunningSoftmax
    right: RunningSoftmax
    factor: float
    """The factor of the old l, as seen from `got`."""
    factor_o: float
    right_factor: float
    """The right factor of the old l and O, exp(old m - new m)."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """Name the wrong ones among m, l and O."""
        pairs = (("m", [self.got.m], [self.right.m]), ("l", [self.got.l], [self.right.l]))
        wrong = [name for name, got, right in pairs if not _close(got, right)]
        return (*wrong, *(["O"] if not _close(self.got.o, self.right.o) else []))


class Partial(NamedTuple):
    """The state that the exercise's `softmax_step` takes and returns: arrays m [1], l [1] and o [1,
    3].
    """

    m: Any
    l: Any  # noqa: E741 (the exercise's name)
    o: Any


@cache
def scaled_row(times: float) -> Row:
    """Return the stored row with its scores multiplied by `times`."""
    stored = json.loads(ROW.read_text())["figures"]
    scores = tuple(times * score for score in stored["scores"])
    return Row(tuple(stored["tokens"]), scores, tuple(map(tuple, stored["values"])), stored["layer"], stored["head"])


def walked(row: Row, keys_a_tile: int, softmax_step: Callable[..., Any] | None = None) -> tuple[Step, ...]:
    """Sum the row tile by tile, with the reader's `softmax_step` if there is one.

    Raises:
        MinivllmError: The reader's code returns no state, or does not end.
    """
    right = online_softmax(row.scores, row.values, keys_a_tile)
    cuts = [*range(0, len(row.scores), keys_a_tile), len(row.scores)]
    got = right if softmax_step is None else _readers(row, cuts, softmax_step)
    tiles = zip(pairwise(cuts), pairwise(got), pairwise(right), strict=True)
    return tuple(_step(row, *ends, both, true) for ends, both, true in tiles)


def _step(row: Row, first: int, end: int, got: Sequence[RunningSoftmax], right: Sequence[RunningSoftmax]) -> Step:
    weights = [_exp(score - got[1].m) for score in row.scores[first:end]]
    added = sum(weight * value[0] for weight, value in zip(weights, row.values[first:end], strict=True))
    factor = _ratio(got[1].l - sum(weights), got[0].l)
    factor_o = _ratio(got[1].o[0] - added, got[0].o[0])
    return Step(first, end, got[1], right[1], factor, factor_o, _exp(right[0].m - right[1].m))


def _readers(row: Row, cuts: Sequence[int], softmax_step: Callable[..., Any]) -> list[RunningSoftmax]:
    """Return the states before and after each tile, computed by the reader's code with NumPy
    arrays.
    """
    import numpy as np  # only the reader's code needs NumPy

    state: Any = Partial(np.full(1, -np.inf), np.zeros(1), np.zeros((1, len(row.values[0]))))
    states = [_read(state, 0)]
    for tile, (first, end) in enumerate(pairwise(cuts), 1):
        scores, values = np.array([row.scores[first:end]]), np.array(row.values[first:end])
        with np.errstate(all="ignore"), bounded(PATIENCE, "your softmax_step"):
            state = softmax_step(state, scores, values)
        states.append(_read(state, tile))
    return states


def _read(state: Any, tile: int) -> RunningSoftmax:
    try:
        numbers = [float(part.reshape(-1)[0]) for part in state[:2]]
        output = tuple(float(x) for x in state[2].reshape(-1))
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise MinivllmError(
            f"your softmax_step returned {type(state).__name__} at tile {tile}; it must return a Partial of arrays: "
            "m [rows], l [rows], o [rows, head_dim]"
        ) from error
    if len(output) != 3:
        raise MinivllmError(f"your softmax_step returned an o of {len(output)} numbers at tile {tile}; it must hold 3")
    return RunningSoftmax(*numbers, output)


def _close(got: Sequence[float], right: Sequence[float]) -> bool:
    return all(a == b or abs(a - b) <= CLOSE * max(1.0, abs(b)) for a, b in zip(got, right, strict=True))


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, 700.0)) if not math.isnan(exponent) else math.nan


def _ratio(new: float, old: float) -> float:
    return new / old if old else 0.0
