"""The worker's side of the offloading connector, which copies blocks in two threads, one for stores
and one for loads.

Stores keep their order. A block of the tier is overwritten only when no load reads it any more.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/worker.py` (`SimpleCPUOffloadWorker`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from minivllm.core.kv_connector import KVCaches, KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.host_copies import HostCopies, host_buffer
from minivllm.kv_connector.offload.metadata import BlockCopy, OffloadMetadata

SECONDS_WITHOUT_TOKENS = 0.005
"""How long a step in which nobody computes waits for a copy to end."""


class OffloadWorker(KVConnectorBase_V1):
    """One rank's block copies. Everything but the copies themselves belongs to one thread."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.WORKER) -> None:
        super().__init__(config, role)
        # One thread each: stores keep their order, and a load need not wait for them.
        self._storing = ThreadPoolExecutor(1, "kv-store")
        self._loading = ThreadPoolExecutor(1, "kv-load")
        self._host: torch.Tensor | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._stores: dict[int, Future[tuple[int, float]]] = {}
        self._loads: dict[str, Future[tuple[int, float]]] = {}
        self._completed_stores: list[int] = []
        self._stats: dict[str, Any] = {}
        self._computes = False

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Build a table of all cache tensors."""
        self.regions = BlockRegions.of([tensor for tensors in kv_caches.values() for tensor in tensors])
        self._to_host, self._from_host = HostCopies(self.regions), HostCopies(self.regions)

    def get_handshake_metadata(self) -> int:
        """Return the size of a block on this rank, in bytes."""
        return self.regions.record_bytes

    @property
    def _orders(self) -> OffloadMetadata:
        assert isinstance(self._connector_metadata, OffloadMetadata)
        return self._connector_metadata

    def start_load_kv(self) -> None:
        """Wait for the stores that must finish first, and begin the step's loads."""
        metadata = self._orders
        if self._host is None:
            self._take_host_memory(metadata.num_cpu_blocks)
        self._computes = False
        if metadata.need_flush:
            # The scheduler has given their blocks to other requests: finish before the forward pass
            # writes there.
            wait(self._stores.values())
        for name, copy in metadata.loads.items():
            self._loads[name] = self._loading.submit(self._move, self._from_host.from_host, copy)

    def _take_host_memory(self, num_blocks: int) -> None:
        """Allocate the tier, and compile the copying kernel if needed; the first step calls this."""
        self._host = host_buffer(num_blocks, self.regions.record_bytes, pinned=self.regions.device.type == "cuda")
        self._to_host.to_host([0], self._host, [0])  # the null block

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Record that this step computes. There is nothing to wait for: a load never belongs to the
        step that computes.
        """
        self._computes = True

    def wait_for_save(self) -> None:
        """Begin the step's store. Its blocks are not overwritten until it has finished; see
        `need_flush`.
        """
        # Recorded behind the forward pass, so the copy begins when that has written the blocks.
        after = torch.cuda.Event() if self.regions.device.type == "cuda" and self._orders.stores else None
        if after is not None:
            after.record()
        for number, copy in self._orders.stores.items():
            self._stores[number] = self._storing.submit(self._move, self._to_host.to_host, copy, after)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Collect the copies that have finished; return the requests whose loads are among them."""
        under_way = [*self._stores.values(), *self._loads.values()]
        if not self._computes and under_way:
            # Otherwise empty steps would spin until the copy has ended.
            wait(under_way, SECONDS_WITHOUT_TOKENS, FIRST_COMPLETED)
        for number in [number for number, future in self._stores.items() if future.done()]:
            self._observe("store", *self._stores.pop(number).result())
            self._completed_stores.append(number)
        ended = {name for name, future in self._loads.items() if future.done()}
        for name in ended:
            self._observe("load", *self._loads.pop(name).result())
        return set(), ended

    def _observe(self, kind: str, num_bytes: int, seconds: float) -> None:
        stats = self._stats
        stats[f"kv_offload_{kind}_bytes"] = stats.get(f"kv_offload_{kind}_bytes", 0) + num_bytes
        stats[f"kv_offload_{kind}_time"] = stats.get(f"kv_offload_{kind}_time", 0.0) + seconds

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """Return the bytes and seconds of the copies since the last call."""
        stats, self._stats = self._stats, {}
        return stats or None

    def build_connector_worker_meta(self) -> list[int] | None:
        """Return the numbers of the stores that have finished."""
        completed, self._completed_stores = self._completed_stores, []
        return completed or None

    def reset(self) -> None:
        """Wait for all copies, and forget them."""
        wait([*self._stores.values(), *self._loads.values()])
        self._forget_all()

    def shutdown(self) -> None:
        """Stop the threads."""
        self._storing.shutdown()
        self._loading.shutdown()

    def _move(self, move: Callable[..., None], copy: BlockCopy, *after: Any) -> tuple[int, float]:
        """Copy blocks, in one of the threads; return the number of bytes and the seconds taken."""
        start = time.perf_counter()
        # Block 0, the null block, takes no memory here.
        move(copy.block_ids, self._host, [block_id - 1 for block_id in copy.cpu_block_ids], *after)
        return len(copy.block_ids) * self.regions.record_bytes, time.perf_counter() - start
