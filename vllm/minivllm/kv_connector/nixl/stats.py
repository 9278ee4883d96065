"""What NIXL's connector counts, and vLLM's names, types and buckets for it.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py` (`NixlKVConnectorStats`,
`NixlPromMetrics`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm.kv_connector.nixl.agent import TransferTimes

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
HISTOGRAMS = {
    "nixl_xfer_time_seconds": ("Time of a NIXL transfer.", SECONDS[1:]),
    "nixl_post_time_seconds": ("Time to post a NIXL transfer.", SECONDS),
    "nixl_bytes_transferred": ("Bytes of a NIXL transfer.", tuple(2**power for power in range(11, 35, 2))),
    "nixl_num_descriptors": (
        "Descriptors of a NIXL transfer.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    ),
}
COUNTERS = {
    "nixl_num_failed_transfers": "NIXL transfers that failed.",
    "nixl_num_failed_notifications": "NIXL notifications that could not be sent.",
    "nixl_num_kv_expired_reqs": "Requests whose blocks nobody has read in time.",
}


class NixlKVConnectorStats:
    """One rank's counts since they were last taken: a list of observations for a histogram, a number for a counter."""

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {}

    def record_transfer(self, times: "TransferTimes") -> None:
        """A transfer that is done."""
        self._observe("nixl_xfer_time_seconds", times.seconds)
        self._observe("nixl_post_time_seconds", times.post_seconds)
        self._observe("nixl_bytes_transferred", times.num_bytes)
        self._observe("nixl_num_descriptors", times.num_descriptors)

    def record_failed_transfer(self) -> None:
        """A handshake or a transfer that has failed."""
        self._count("nixl_num_failed_transfers")

    def record_failed_notification(self) -> None:
        """A peer that could not be told."""
        self._count("nixl_num_failed_notifications")

    def record_expired(self, num_requests: int) -> None:
        """Leases that have run out."""
        self._count("nixl_num_kv_expired_reqs", num_requests)

    def take(self) -> dict[str, Any] | None:
        """Returns the counts since the last call; None for none."""
        counts, self._counts = self._counts, {}
        return counts or None

    def _observe(self, name: str, value: float) -> None:
        self._counts.setdefault(name, []).append(value)

    def _count(self, name: str, by: int = 1) -> None:
        if by:
            self._counts[name] = self._counts.get(name, 0) + by
