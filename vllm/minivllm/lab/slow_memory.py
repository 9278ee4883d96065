"""A NumPy array in slow memory: every trip to the chip and back is counted in bytes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Trips:
    """Bytes that went one way and the other."""

    read: int = 0
    written: int = 0


class SlowArray(np.ndarray):
    """`a[rows]` brings a plain array to the chip, `a[rows] = tile` takes one back; `trips` adds up both.

    `np.empty_like(a, shape=...)` makes a new array in the same slow memory, with the same `trips`.
    """

    trips: Trips

    def __array_finalize__(self, parent: Any) -> None:
        self.trips = getattr(parent, "trips", None) or Trips()

    def __getitem__(self, index: Any) -> np.ndarray:
        """The elements as a plain array; counted as read."""
        tile = np.asarray(self)[index]
        self.trips.read += tile.nbytes
        return tile

    def __setitem__(self, index: Any, tile: Any) -> None:
        """Store `tile`; counted as written."""
        plain = np.asarray(self)
        plain[index] = tile
        self.trips.written += plain[index].nbytes


def in_slow_memory(*arrays: np.ndarray) -> tuple[list[SlowArray], Trips]:
    """The arrays in one slow memory, and the count of what goes in and out of it from now on."""
    trips, slow = Trips(), [array.view(SlowArray) for array in arrays]
    for array in slow:
        array.trips = trips
    return slow, trips


def count_trips(function: Callable[..., object], *arrays: np.ndarray) -> tuple[Trips, float]:
    """Call `function` on the arrays in slow memory: its trips, and the MiB that it allocated at its peak."""
    slow, trips = in_slow_memory(*arrays)
    tracemalloc.start()
    try:
        function(*slow)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return trips, peak / 2**20
