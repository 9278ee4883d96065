"""The rows of a step grouped by adapter: row indices stably sorted by slot, and where each slot's
rows begin.

    slot of each row      2  -1   0   2   0          (-1: none)
    sorted indices        1 | 2   4 | 0   3
    active slots              0       2
    starts, counts            1, 2    3, 2           positions in the sorted indices

One launch serves all adapters: a program takes a tile of the rows of one active slot. The sort
costs the host a few microseconds a step; all linears of the step share it.

In vLLM v0.33.0: `vllm/lora/ops/triton_ops/lora_kernel_metadata.py` (`LoRAKernelMeta`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# The most rows in a program of the CPU form.
CPU_TILE = 16


class Adapters(NamedTuple):
    """A linear's adapter slots; shapes as in `lora_linear.py`. `edges` is `bounds` on the host."""

    a: Tensor
    b: Tensor
    ranks: Tensor
    bounds: Tensor
    edges: Sequence[int]


class LoRAKernelMeta:
    """One step's rows grouped by adapter, at fixed addresses, so that a CUDA graph can read them;
    `prepare` refills them.

    - `indices` `[max_rows]`, `active` (-1 beyond the active slots), `starts`, `counts`
      `[max_loras]`: int32, as above.
    - `num_rows`; `num_active`: slots with rows; `most_rows`: rows of the largest one. All on the
      host.
    """

    def __init__(self, max_rows: int, max_loras: int, device: torch.device) -> None:
        self.max_loras = max_loras
        self.device = device
        self.num_rows = self.num_active = self.most_rows = 0
        # For the CPU form: slot, first place and number of rows of each tile `[3, tiles]`.
        self.tiles = np.zeros((3, 0), np.int64)
        # The number of tiles, and the addresses of `indices` and of `tiles`.
        self.cpu_tiles = (0, 0, 0)
        self._prepared: np.ndarray | None = None
        self._allocate(max_rows)

    def _allocate(self, max_rows: int) -> None:
        self.max_rows = max_rows
        sizes = [max_rows, *[self.max_loras] * 3]
        self._host = np.zeros(sum(sizes), np.int32)
        self._device = torch.from_numpy(self._host).to(self.device)  # on a CPU, the same memory
        self.indices, self.active, self.starts, self.counts = self._device.split(sizes)
        self._parts = np.split(self._host, np.cumsum(sizes[:-1]))

    def prepare(self, slots: np.ndarray) -> None:
        """Set the slot of each row, int32 `[rows]`, -1 for none. More rows than `max_rows` get new
        buffers.
        """
        if self._prepared is not None and np.array_equal(slots, self._prepared):
            return  # most steps decode for the same requests as the one before
        self._prepared = slots.copy()
        if len(slots) > self.max_rows:
            self._allocate(len(slots))
        self.num_rows = len(slots)
        order = np.argsort(slots, kind="stable")  # stable: rows of a slot keep their order
        # Of rows without an adapter, then of each slot.
        counts = np.bincount(slots + 1, minlength=self.max_loras + 1)
        starts = np.cumsum(counts) - counts
        active = np.flatnonzero(counts[1:])
        self.num_active = len(active)
        self.most_rows = int(counts[1:].max(initial=0))
        parts = (order, active, starts[1:][active], counts[1:][active])
        for part, values, beyond in zip(self._parts, parts, (0, -1, 0, 0), strict=True):
            part[: len(values)] = values
            part[len(values) :] = beyond
        if self.device.type == "cpu":
            self.tiles = _tiles(*parts[1:])
            self.cpu_tiles = self.tiles.shape[1], self.indices.data_ptr(), self.tiles.ctypes.data
        else:
            self._device.copy_(torch.from_numpy(self._host).pin_memory(), non_blocking=True)


def _tiles(active: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    per_slot = -(-counts // CPU_TILE)  # tiles of each active slot
    places = (np.arange(per_slot.sum()) - np.repeat(np.cumsum(per_slot) - per_slot, per_slot)) * CPU_TILE
    rows = np.minimum(np.repeat(counts, per_slot) - places, CPU_TILE)
    return np.stack((np.repeat(active, per_slot), np.repeat(starts, per_slot) + places, rows)).astype(np.int64)
