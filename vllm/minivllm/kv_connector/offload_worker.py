"""A rank's side of the offloading connector: copies blocks in two threads, one that stores and one that loads.

Stores keep their order, so what the tier evicts is written to its file before it is overwritten.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/worker.py` (`SimpleCPUOffloadWorker`).
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minivllm.core.kv_connector import KVCaches, KVConnectorConfig
from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.disk_files import DiskFiles
from minivllm.kv_connector.host_copies import HostCopies, host_buffer
from minivllm.kv_connector.offload_metadata import LoadJob, OffloadMetadata, OffloadWorkerMetadata, StoreJob

SECONDS_WITHOUT_TOKENS = 0.005
"""How long a step in which nobody computes waits for a copy to end."""
BOUNCE_BYTES = 8 * 2**20
"""How much is read from files before it is copied into the cache."""


class Copied(NamedTuple):
    """A copy that has ended: its bytes and seconds, and keys whose file could not be written or read."""

    num_bytes: int
    seconds: float
    failed: set[bytes]


class OffloadWorker:
    """See `KVConnectorBase_V1` for the methods that have no words here. Everything but the copies is one thread's."""

    def __init__(self, config: KVConnectorConfig) -> None:
        self.config = config
        self.rank = config.pipeline_parallel_rank * config.tensor_parallel_size + config.tensor_parallel_rank
        self._storing = ThreadPoolExecutor(1, "kv-store")
        self._loading = ThreadPoolExecutor(1, "kv-load")
        self._host: torch.Tensor | None = None
        self._disk: DiskFiles | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._stores: dict[int, Future[Copied]] = {}
        self._loads: dict[str, tuple[LoadJob, Future[Copied]]] = {}
        self._others: list[Future[None]] = []
        self._invalid_block_ids: set[int] = set()
        self._told = OffloadWorkerMetadata()
        self._stats: dict[str, Any] = {}
        self._computes = False

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Makes a table of all tensors."""
        self.regions = BlockRegions.of([tensor for tensors in kv_caches.values() for tensor in tensors])
        self._to_host, self._from_host = HostCopies(self.regions), HostCopies(self.regions)

    def start_load_kv(self, metadata: OffloadMetadata) -> None:
        """Ends what must end first, and begins the step's loads."""
        self._prepare(metadata)
        self._computes = False
        if metadata.need_flush:
            wait(self._stores.values())
        if self._disk is not None:
            if metadata.clear_disk:
                self._others.append(self._storing.submit(self._disk.clear))
            if metadata.removals:
                self._others.append(self._storing.submit(self._disk.remove, metadata.removals))
        for name, job in metadata.loads.items():
            self._loads[name] = job, self._loading.submit(self._load, job)

    def _prepare(self, metadata: OffloadMetadata) -> None:
        """Takes the host memory when the first step says how much; and compiles what copies, if need be."""
        if self._host is None:
            record = self.regions.record_bytes
            self._host = host_buffer(metadata.num_cpu_blocks, record, pinned=self.regions.device.type == "cuda")
            self._to_host.to_host([0], self._host, [0])  # the null block
            most = max(1, min(metadata.num_cpu_blocks, BOUNCE_BYTES // record))
            self._bounce = host_buffer(most if metadata.disk_folder else 0, record, pinned=False)
        if self._disk is None and metadata.disk_folder is not None:
            self._disk = DiskFiles(Path(metadata.disk_folder), self.rank)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for nothing: a load never belongs to the step that computes. Takes note that this one does."""
        self._computes = True

    def wait_for_save(self, metadata: OffloadMetadata) -> None:
        """Begins the step's store. Its blocks are not overwritten before it has ended; see `need_flush`."""
        if (job := metadata.store) is None:
            return
        after = None
        if self.regions.device.type == "cuda":
            after = torch.cuda.Event()
            after.record()
        self._stores[job.number] = self._storing.submit(self._store, job, after)

    def get_finished(self) -> set[str]:
        """Takes note of the copies that have ended; returns the requests whose loads have."""
        under_way = [*self._stores.values(), *(future for _, future in self._loads.values())]
        if not self._computes and under_way:
            wait(under_way, SECONDS_WITHOUT_TOKENS, FIRST_COMPLETED)
        self._others = [future for future in self._others if not _is_over(future)]
        for number in [number for number, future in self._stores.items() if future.done()]:
            copied = self._stores.pop(number).result()
            self._told.unwritten.update(copied.failed)
            self._told.completed_stores.append(number)
            self._observe("store", copied)
        ended = {name for name, (_, future) in self._loads.items() if future.done()}
        for name in ended:
            self._take_loaded(*self._loads.pop(name))
        return ended

    def _take_loaded(self, job: LoadJob, future: Future[Copied]) -> None:
        copied = future.result()
        self._told.unreadable.update(copied.failed)
        where = zip(job.disk_keys, job.disk_block_ids, strict=True)
        self._invalid_block_ids.update(block_id for key, block_id in where if key in copied.failed)
        self._observe("load", copied)

    def _observe(self, kind: str, copied: Copied) -> None:
        stats = self._stats
        stats[f"kv_offload_{kind}_bytes"] = stats.get(f"kv_offload_{kind}_bytes", 0) + copied.num_bytes
        stats[f"kv_offload_{kind}_time"] = stats.get(f"kv_offload_{kind}_time", 0.0) + copied.seconds
        stats.setdefault(f"kv_offload_{kind}_size", []).append(copied.num_bytes)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those whose files could not be read."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """Bytes and seconds of the copies."""
        stats, self._stats = self._stats, {}
        return stats or None

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """Which stores have ended, and which files are lost."""
        told, self._told = self._told, OffloadWorkerMetadata()
        told.disk_failed = self._disk is not None and self._disk.failed and bool(told.unwritten)
        return None if told.is_empty() else told

    def reset(self) -> None:
        """Waits for all copies, and forgets them."""
        wait(self._others)
        wait([*self._stores.values(), *(future for _, future in self._loads.values())])
        self._forget_all()

    def shutdown(self) -> None:
        """Ends the threads."""
        self._storing.shutdown()
        self._loading.shutdown()

    # In the threads

    def _store(self, job: StoreJob, after: Any) -> Copied:
        assert self._host is not None
        start, record = time.perf_counter(), self.regions.record_bytes
        unwritten: set[bytes] = set()
        for key, block_id in job.spills:
            assert self._disk is not None
            if not self._disk.write(key, self._host[(block_id - 1) * record : block_id * record].numpy()):
                unwritten.add(key)
        self._to_host.to_host(job.block_ids, self._host, [one - 1 for one in job.cpu_block_ids], after)
        return Copied(len(job.block_ids) * record, time.perf_counter() - start, unwritten)

    def _load(self, job: LoadJob) -> Copied:
        assert self._host is not None
        start = time.perf_counter()
        if job.block_ids:
            self._from_host.from_host(job.block_ids, self._host, [one - 1 for one in job.cpu_block_ids])
        unreadable = self._load_files(job)
        num_blocks = len(job.block_ids) + len(job.disk_block_ids) - len(unreadable)
        return Copied(num_blocks * self.regions.record_bytes, time.perf_counter() - start, unreadable)

    def _load_files(self, job: LoadJob) -> set[bytes]:
        """Reads as many files as the buffer has room for, then copies their blocks; returns what is unreadable."""
        unreadable: set[bytes] = set()
        record = self.regions.record_bytes
        most = len(self._bounce) // record
        for first in range(0, len(job.disk_keys), max(1, most)):
            filled: list[int] = []
            chosen = zip(job.disk_keys[first : first + most], job.disk_block_ids[first : first + most], strict=True)
            for key, block_id in chosen:
                assert self._disk is not None
                into = self._bounce[len(filled) * record : (len(filled) + 1) * record].numpy()
                if self._disk.read(key, into):
                    filled.append(block_id)
                else:
                    unreadable.add(key)
            if filled:
                self._from_host.from_host(filled, self._bounce, range(len(filled)))
        return unreadable


def _is_over(future: Future[None]) -> bool:
    """Whether it is; raises what it has raised."""
    if not future.done():
        return False
    future.result()
    return True
