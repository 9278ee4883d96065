"""A NumPy array in simulated slow memory that counts the bytes moved to the chip and back."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm_lab.flash_attention.attention_traffic import Traffic


@dataclass
class Trips:
    """Bytes moved in each direction."""

    read: int = 0
    written: int = 0


class SlowArray(np.ndarray):
    """An array in slow memory: `a[rows]` reads a plain array to the chip, `a[rows] = tile` writes
    one back, and `trips` counts both.

    `np.empty_like(a, shape=...)` makes a new array in the same slow memory, with the same `trips`.
    """

    trips: Trips

    def __array_finalize__(self, parent: Any) -> None:
        self.trips = getattr(parent, "trips", None) or Trips()

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the elements as a plain array, and count them as read."""
        tile = np.asarray(self)[index]
        self.trips.read += tile.nbytes
        return tile

    def __setitem__(self, index: Any, tile: Any) -> None:
        """Store `tile`, and count it as written."""
        plain = np.asarray(self)
        plain[index] = tile
        self.trips.written += plain[index].nbytes


def in_slow_memory(*arrays: np.ndarray) -> tuple[list[SlowArray], Trips]:
    """Put the arrays into one slow memory; return them and the counter of its traffic from now
    on.
    """
    trips, slow = Trips(), [array.view(SlowArray) for array in arrays]
    for array in slow:
        array.trips = trips
    return slow, trips


def peak_of(attend: Callable[..., object], arrays: Iterable[np.ndarray], expected: Traffic) -> float:
    """Call `attend` on the arrays in slow memory; return its peak allocation in MiB.

    Raises:
        AssertionError: the bytes that it moves differ from `expected`.
    """
    slow, trips = in_slow_memory(*arrays)
    tracemalloc.start()
    try:
        attend(*slow)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (trips.read, trips.written) == (expected.read, expected.written), f"{trips}, not {expected}"
    return peak / 2**20
