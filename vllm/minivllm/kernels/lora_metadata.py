"""Which rows of a step use which adapter: the rows' indices stably sorted by slot, and where each slot's begin.

    slot of each row      2  -1   0   2   0          (-1: none)
    sorted indices        1 | 2   4 | 0   3
    active slots              0       2
    starts, counts            1, 2    3, 2           places in the sorted indices

One launch serves all adapters: a program takes a tile of the rows of one active slot. The sort costs the host a few
microseconds a step; all linears of the step share it.

In vLLM v0.33.0: `vllm/lora/ops/triton_ops/lora_kernel_metadata.py` (`LoRAKernelMeta`).
"""

from __future__ import annotations

import numpy as np
import torch

CPU_TILE = 16
"""The most rows in a program of the CPU form."""


class LoRAKernelMeta:
    """The rows of one step at fixed addresses, so that a CUDA graph can read them; `prepare` fills them anew.

    - `indices` `[max_rows]`, `active` (-1 beyond the active slots), `starts`, `counts` `[max_loras]`: int32, as above.
    - `num_rows`; `num_active`: slots with rows; `most_rows`: the most rows of one of them. On the host.
    """

    def __init__(self, max_rows: int, max_loras: int, device: torch.device) -> None:
        self.max_loras, self.device = max_loras, device
        self.num_rows = self.num_active = self.most_rows = 0
        self.tiles = np.zeros((3, 0), np.int64)
        """For the CPU form: slot, first place and number of rows of each tile `[3, tiles]`."""
        self.cpu_tiles = (0, 0, 0)
        """How many there are, and the addresses of `indices` and of `tiles`."""
        self._prepared: np.ndarray | None = None
        self._allocate(max_rows)

    def _allocate(self, max_rows: int) -> None:
        max_loras, device = self.max_loras, self.device
        self.max_rows = max_rows
        self._host = np.zeros(max_rows + 3 * max_loras, np.int32)
        self._device = torch.from_numpy(self._host) if device.type == "cpu" else torch.zeros(len(self._host)).int()
        self._device = self._device.to(device)
        self.indices, self.active, self.starts, self.counts = self._device.split([max_rows, *[max_loras] * 3])
        self._parts = np.split(self._host, [max_rows, max_rows + max_loras, max_rows + 2 * max_loras])

    def prepare(self, slots: np.ndarray) -> None:
        """Takes the slot of each row, -1 for none: int32 `[rows]`. More than `max_rows` get buffers of their own."""
        if self._prepared is not None and np.array_equal(slots, self._prepared):
            return  # most steps decode for the same requests as the one before
        self._prepared = slots.copy()
        if len(slots) > self.max_rows:
            self._allocate(len(slots))
        self.num_rows = len(slots)
        order = np.argsort(slots, kind="stable")
        counts = np.bincount(slots + 1, minlength=self.max_loras + 1)
        starts = np.cumsum(counts) - counts
        active = np.flatnonzero(counts[1:])
        self.num_active = len(active)
        self.most_rows = int(counts[1:].max(initial=0))
        for part, values, beyond in zip(
            self._parts, (order, active, starts[1:][active], counts[1:][active]), (0, -1, 0, 0), strict=True
        ):
            part[: len(values)] = values
            part[len(values) :] = beyond
        if self.device.type == "cpu":
            self.tiles = _tiles(active, starts[1:][active], counts[1:][active])
            self.cpu_tiles = self.tiles.shape[1], self.indices.data_ptr(), self.tiles.ctypes.data
        else:
            self._device.copy_(torch.from_numpy(self._host).pin_memory(), non_blocking=True)


def _tiles(active: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    per_slot = -(-counts // CPU_TILE)
    places = (np.arange(per_slot.sum()) - np.repeat(np.cumsum(per_slot) - per_slot, per_slot)) * CPU_TILE
    rows = np.minimum(np.repeat(counts, per_slot) - places, CPU_TILE)
    return np.stack((np.repeat(active, per_slot), np.repeat(starts, per_slot) + places, rows)).astype(np.int64)
