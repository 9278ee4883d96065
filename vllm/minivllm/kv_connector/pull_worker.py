"""The workers' side of connectors that pull: what has arrived, what is lost, and which blocks no
longer need to be kept.

The connectors built on this move the bytes, and call `receive` or `lose` once for each read.
"""

from itertools import groupby
from typing import Any

from minivllm.core.kv_connector import KVCaches, KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.kv_connector.pull_leases import Leases
from minivllm.kv_connector.pull_scheduler import PullConnectorMetadata
from minivllm.logger import init_logger

logger = init_logger(__name__)


class PullConnectorWorker(KVConnectorBase_V1):
    """Leases, results and statistics of one rank. `kind`, such as "tcp", is the prefix of its
    metrics' names.
    """

    kind: str

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole, lease_duration: float) -> None:
        super().__init__(config, role)
        self.leases = Leases(lease_duration)
        self.forget_results()

    @property
    def orders(self) -> PullConnectorMetadata:
        """Return the orders from the scheduler's side for this step."""
        assert isinstance(self._connector_metadata, PullConnectorMetadata)
        return self._connector_metadata

    def look(self) -> None:
        """Process the reads and notifications that have completed since the last call."""

    def receive(self, request_id: str) -> None:
        """Record that a request's blocks have arrived."""
        self._received.add(request_id)

    def lose(self, request_id: str, error: object) -> None:
        """Record that a request's blocks will not arrive."""
        logger.warning("The blocks of request %s were not read: %s", request_id, error)
        self.count("num_failed_transfers")
        self._received.add(request_id)
        self._failed.add(request_id)

    def tell(self, request_id: str) -> None:
        """Record that a prefill engine has learned that its blocks are not needed, or cannot be
        reached.
        """
        self._told.append(request_id)

    def count(self, name: str, by: int = 1) -> None:
        """Add `by` to a counter."""
        name = f"{self.kind}_{name}"
        self._stats[name] = self._stats.get(name, 0) + by

    def observe(self, **values: float) -> None:
        """Add an observation to each of these histograms."""
        for name, value in values.items():
            self._stats.setdefault(f"{self.kind}_{name}", []).append(value)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.look()
        read, expired = self.leases.take_ended()
        if expired:
            self.count("num_kv_expired_reqs", len(expired))
            logger.warning("The blocks of %s were not read in time and are free now", ", ".join(sorted(expired)))
        received, self._received = self._received, set()
        # For the scheduler both mean the same: the blocks need not be kept any more.
        return read | expired, received

    def get_failed_recving(self) -> set[str]:
        failed, self._failed = self._failed, set()
        return failed

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        stats, self._stats = self._stats, {}
        return stats or None

    def build_connector_worker_meta(self) -> list[str] | None:
        request_ids = [self._told.pop() for _ in range(len(self._told))]  # other threads may append meanwhile
        return request_ids or None

    def forget_results(self) -> None:
        """Forget everything that has not been reported to the scheduler yet."""
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._told: list[str] = []
        self._stats: dict[str, Any] = {}


def layout_of(config: KVConnectorConfig, kv_caches: KVCaches) -> dict[str, str]:
    """Describe everything that must be equal on both sides for the bytes to have the same meaning."""
    shapes = ([(str(tensor.dtype), list(tensor.shape[1:])) for tensor in layer] for layer in kv_caches.values())
    layers = groupby(map(str, shapes))
    return {
        "model": config.model_fingerprint,
        "block_size": str(config.block_size),
        "kv_cache_layout": config.kv_cache_layout,
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "tensor_parallel_rank": str(config.tensor_parallel_rank),
        "the cache": ", ".join(f"{len(list(alike))} layers of {shape}" for shape, alike in layers),
    }
