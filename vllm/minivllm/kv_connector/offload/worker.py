"""A rank's side of the offloading connector: copies blocks in two threads, one that stores and one that loads.

Stores keep their order. A block of the tier is only overwritten when nobody loads it any more.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/worker.py` (`SimpleCPUOffloadWorker`).
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from minivllm.core.kv_connector import KVCaches, KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.host_copies import HostCopies, host_buffer
from minivllm.kv_connector.offload.metadata import LoadJob, OffloadMetadata, OffloadWorkerMetadata, StoreJob

SECONDS_WITHOUT_TOKENS = 0.005
"""How long a step in which nobody computes waits for a copy to end."""


class Copied(NamedTuple):
    """A copy that has ended."""

    num_bytes: int
    seconds: float


class OffloadWorker(KVConnectorBase_V1):
    """Copies blocks of one rank. Everything but the copies is one thread's."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.WORKER) -> None:
        super().__init__(config, role)
        self._storing = ThreadPoolExecutor(1, "kv-store")
        self._loading = ThreadPoolExecutor(1, "kv-load")
        self._host: torch.Tensor | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._stores: dict[int, Future[Copied]] = {}
        self._loads: dict[str, Future[Copied]] = {}
        self._completed_stores: list[int] = []
        self._stats: dict[str, Any] = {}
        self._computes = False

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Makes a table of all tensors."""
        self.regions = BlockRegions.of([tensor for tensors in kv_caches.values() for tensor in tensors])
        self._to_host, self._from_host = HostCopies(self.regions), HostCopies(self.regions)

    def get_handshake_metadata(self) -> int:
        """Return the bytes of a block on this rank."""
        return self.regions.record_bytes

    @property
    def _orders(self) -> OffloadMetadata:
        assert isinstance(self._connector_metadata, OffloadMetadata)
        return self._connector_metadata

    def start_load_kv(self) -> None:
        """End what must end first, and begin the step's loads."""
        metadata = self._orders
        if self._host is None:
            self._take_host_memory(metadata.num_cpu_blocks)
        self._computes = False
        if metadata.need_flush:
            wait(self._stores.values())
        for name, job in metadata.loads.items():
            self._loads[name] = self._loading.submit(self._load, job)

    def _take_host_memory(self, num_blocks: int) -> None:
        """When the first step says how much; compiles what copies, if need be."""
        self._host = host_buffer(num_blocks, self.regions.record_bytes, pinned=self.regions.device.type == "cuda")
        self._to_host.to_host([0], self._host, [0])  # the null block

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for nothing: a load never belongs to the step that computes. Takes note that this one does."""
        self._computes = True

    def wait_for_save(self) -> None:
        """Begins the step's store. Its blocks are not overwritten before it has ended; see `need_flush`."""
        if (job := self._orders.store) is None:
            return
        after = None
        if self.regions.device.type == "cuda":
            after = torch.cuda.Event()
            after.record()
        self._stores[job.number] = self._storing.submit(self._store, job, after)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Take note of the copies that have ended; return the requests whose loads have."""
        under_way = [*self._stores.values(), *self._loads.values()]
        if not self._computes and under_way:
            wait(under_way, SECONDS_WITHOUT_TOKENS, FIRST_COMPLETED)
        for number in [number for number, future in self._stores.items() if future.done()]:
            self._observe("store", self._stores.pop(number).result())
            self._completed_stores.append(number)
        ended = {name for name, future in self._loads.items() if future.done()}
        for name in ended:
            self._observe("load", self._loads.pop(name).result())
        return set(), ended

    def _observe(self, kind: str, copied: Copied) -> None:
        stats = self._stats
        stats[f"kv_offload_{kind}_bytes"] = stats.get(f"kv_offload_{kind}_bytes", 0) + copied.num_bytes
        stats[f"kv_offload_{kind}_time"] = stats.get(f"kv_offload_{kind}_time", 0.0) + copied.seconds
        stats.setdefault(f"kv_offload_{kind}_size", []).append(copied.num_bytes)

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """Bytes and seconds of the copies."""
        stats, self._stats = self._stats, {}
        return stats or None

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """Which stores have ended."""
        completed, self._completed_stores = self._completed_stores, []
        return OffloadWorkerMetadata(completed) if completed else None

    def reset(self) -> None:
        """Waits for all copies, and forgets them."""
        wait([*self._stores.values(), *self._loads.values()])
        self._forget_all()

    def shutdown(self) -> None:
        """Ends the threads."""
        self._storing.shutdown()
        self._loading.shutdown()

    # In the threads

    def _store(self, job: StoreJob, after: Any) -> Copied:
        assert self._host is not None
        start = time.perf_counter()
        self._to_host.to_host(job.block_ids, self._host, [one - 1 for one in job.cpu_block_ids], after)
        return self._copied(job, start)

    def _load(self, job: LoadJob) -> Copied:
        assert self._host is not None
        start = time.perf_counter()
        self._from_host.from_host(job.block_ids, self._host, [one - 1 for one in job.cpu_block_ids])
        return self._copied(job, start)

    def _copied(self, job: LoadJob | StoreJob, start: float) -> Copied:
        return Copied(len(job.block_ids) * self.regions.record_bytes, time.perf_counter() - start)
