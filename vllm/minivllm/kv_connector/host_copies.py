"""Copies between a rank's cache and a buffer of host memory in which each block is one contiguous
record.

On a CPU the kernel of `kernels/copy_blocks.py` moves the blocks of all layers straight to their
destination, in one call. On a GPU it gathers them into a staging buffer on the device, in one
launch; from there they cross the bus in pieces as large as runs of consecutive records allow, on a
separate stream from that of the forward pass.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/copy_backend.py`,
`vllm/v1/kv_offload/cpu/gpu_worker.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.kernels.copy_blocks import BlockRegions, gather_blocks, scatter_blocks

STAGING_BYTES = 64 * 2**20


def host_buffer(num_records: int, record_bytes: int, pinned: bool) -> torch.Tensor:
    """Return a uint8 buffer, [records × bytes]. Pages that are not pinned are allocated only when
    first written.
    """
    if pinned:
        return torch.empty(num_records * record_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros(num_records * record_bytes, np.uint8))


class HostCopies:
    """The copies of one thread, which on a GPU go through a staging buffer of `staging_bytes`."""

    def __init__(self, regions: BlockRegions, staging_bytes: int = STAGING_BYTES) -> None:
        self.regions = regions
        self._capacity = max(1, staging_bytes // regions.record_bytes)
        # On a CPU the blocks go straight to host memory, so nothing is staged.
        self._stages = regions.device.type == "cuda"
        if self._stages:
            self._begin_staging()

    def _begin_staging(self) -> None:
        self._stages = True
        size = self._capacity * self.regions.record_bytes
        self._staging = torch.empty(size, dtype=torch.uint8, device=self.regions.device)
        # Copies run beside the forward pass, not behind it.
        self._stream = torch.cuda.Stream(self.regions.device)

    def to_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int], after: Any = None) -> None:
        """Copy these blocks into these records, and wait until they have arrived. `after` is an
        event to wait for first.
        """
        if not self._stages:
            gather_blocks(self.regions, _ids(block_ids), host, _ids(slots))
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                # The forward pass must have written the blocks before they are read.
                self._stream.wait_event(after)
            for chosen, room, pieces in self._batches(block_ids, host, slots):
                gather_blocks(self.regions, chosen, room)
                for staged, there in pieces:
                    there.copy_(staged, non_blocking=True)
        self._stream.synchronize()

    def from_host(self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]) -> None:
        """Copy these records into these blocks."""
        if not self._stages:
            scatter_blocks(self.regions, _ids(block_ids), host, _ids(slots))
            return
        with torch.cuda.stream(self._stream):
            for chosen, room, pieces in self._batches(block_ids, host, slots):
                for staged, there in pieces:
                    staged.copy_(there, non_blocking=True)
                scatter_blocks(self.regions, chosen, room)
        self._stream.synchronize()

    def _batches(
        self, block_ids: Sequence[int], host: torch.Tensor, slots: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Yield batches of blocks that fit the staging buffer: the blocks, their part of the
        buffer, and pairs of staging and host pieces.
        """
        host, staging = host.view(-1, self.regions.record_bytes), self._staging.view(-1, self.regions.record_bytes)
        for at in range(0, len(block_ids), self._capacity):
            chosen = _ids(block_ids[at : at + self._capacity]).to(self.regions.device)
            places = runs(slots[at : at + self._capacity])
            pieces = [(staging[first : first + count], host[slot : slot + count]) for first, slot, count in places]
            yield chosen, staging[: len(chosen)].view(-1), pieces


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive slots: the index of the run's first slot in the list, that slot,
    and the run's length.
    """
    first = 0
    for place in range(1, len(slots) + 1):
        if place == len(slots) or slots[place] != slots[place - 1] + 1:
            yield first, slots[first], place - first
            first = place


def _ids(block_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(block_ids, dtype=torch.int64)
