"""A NumPy array in simulated slow memory that counts the bytes moved to the chip and back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Trips:
    """Bytes moved in each direction."""

    read: int = 0
    written: int = 0


class SlowArray(np.ndarray):
    """`a[rows]` reads a plain array to the chip, `a[rows] = tile` writes one back; `trips` counts both.

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
    """The arrays in one slow memory, and the counter of its traffic from now on."""
    trips, slow = Trips(), [array.view(SlowArray) for array in arrays]
    for array in slow:
        array.trips = trips
    return slow, trips


def count_trips(function: Callable[..., object], *arrays: np.ndarray) -> tuple[Trips, float]:
    """Call `function` on the arrays in slow memory; returns its traffic and its peak allocation in MiB."""
    slow, trips = in_slow_memory(*arrays)
    tracemalloc.start()
    try:
        function(*slow)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return trips, peak / 2**20
