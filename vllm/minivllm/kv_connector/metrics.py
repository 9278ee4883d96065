"""Names, texts and buckets of what connectors count, for Prometheus.

NIXL's are vLLM's; over TCP the same things have the same names but for their beginning.
"""

from minivllm.kv_connector import nixl_stats

TCP_HISTOGRAMS = {
    "tcp_xfer_time_seconds": ("Time of a transfer over TCP.", nixl_stats.SECONDS),
    "tcp_bytes_transferred": ("Bytes of a transfer over TCP.", nixl_stats.HISTOGRAMS["nixl_bytes_transferred"][1]),
}
TCP_COUNTERS = {
    "tcp_num_failed_transfers": "Transfers over TCP that failed.",
    "tcp_num_kv_expired_reqs": "Requests whose blocks nobody has read in time.",
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = nixl_stats.HISTOGRAMS | TCP_HISTOGRAMS
"""By name: the text, and the upper bounds of the buckets. The connector gives a list of observations."""
COUNTERS: dict[str, str] = nixl_stats.COUNTERS | TCP_COUNTERS
"""By name: the text. The connector gives a number to add."""
