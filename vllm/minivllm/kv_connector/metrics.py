"""Names, texts and buckets of what connectors count, for Prometheus.

NIXL's and those of offloading are vLLM's (`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`,
`vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py`); over TCP the same things as NIXL's have the same
names but for their beginning.
"""

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
NIXL_HISTOGRAMS = {
    "nixl_xfer_time_seconds": ("Time of a NIXL transfer.", SECONDS[1:]),
    "nixl_post_time_seconds": ("Time to post a NIXL transfer.", SECONDS),
    "nixl_bytes_transferred": ("Bytes of a NIXL transfer.", tuple(2**power for power in range(11, 35, 2))),
    "nixl_num_descriptors": (
        "Descriptors of a NIXL transfer.",
        (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000),
    ),
}
NIXL_COUNTERS = {
    "nixl_num_failed_transfers": "NIXL transfers that failed.",
    "nixl_num_failed_notifications": "NIXL notifications that could not be sent.",
    "nixl_num_kv_expired_reqs": "Requests whose blocks nobody has read in time.",
}
TCP_HISTOGRAMS = {
    "tcp_xfer_time_seconds": ("Time of a transfer over TCP.", SECONDS[1:]),
    "tcp_bytes_transferred": ("Bytes of a transfer over TCP.", NIXL_HISTOGRAMS["nixl_bytes_transferred"][1]),
}
TCP_COUNTERS = {
    "tcp_num_failed_transfers": "Transfers over TCP that failed.",
    "tcp_num_kv_expired_reqs": "Requests whose blocks nobody has read in time.",
}
OFFLOAD_BYTES = tuple(4**power * 1024 for power in range(12))
OFFLOAD_HISTOGRAMS = {
    "kv_offload_load_size": ("Bytes of a copy from host memory.", OFFLOAD_BYTES),
    "kv_offload_store_size": ("Bytes of a copy to host memory.", OFFLOAD_BYTES),
    "kv_offload_lookup_sync_delay_seconds": (
        "Time to look up a request in host memory.",
        (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1),
    ),
}
OFFLOAD_COUNTERS = {
    "kv_offload_load_bytes": "Bytes copied from host memory.",
    "kv_offload_load_time": "Seconds of these copies.",
    "kv_offload_store_bytes": "Bytes copied to host memory.",
    "kv_offload_store_time": "Seconds of these copies.",
    "kv_offload_allocation_failure": "Steps in which host memory had no room for all blocks to be stored.",
    "simple_kv_offload_load_blocks": "Blocks copied from host memory.",
}
GAUGES = {
    "kv_offload_cpu_cache_usage_perc": "Share of host memory's blocks that hold something, 0 to 1.",
    "kv_offload_cpu_cache_read_usage_perc": "Share of host memory's blocks that are being read, 0 to 1.",
    "kv_offload_cpu_cache_write_usage_perc": "Share of host memory's blocks that are being written, 0 to 1.",
    "simple_kv_offload_used_blocks": "Blocks of host memory that can be found.",
    "simple_kv_offload_pending_store_blocks": "Blocks of host memory that are being written.",
}
"""By name: the text. The connector gives the value."""
COUNTERS_BY = {
    "simple_kv_offload_save_outcomes": (
        "Blocks that were to be stored, by what became of them.",
        "outcome",
        ("stored", "dropped_cpu_full"),
    ),
}
"""By name: the text, a label and its values. The connector gives a number to add for each "name.value"."""
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = NIXL_HISTOGRAMS | TCP_HISTOGRAMS | OFFLOAD_HISTOGRAMS
"""By name: the text, and the upper bounds of the buckets. The connector gives a list of observations."""
COUNTERS: dict[str, str] = NIXL_COUNTERS | TCP_COUNTERS | OFFLOAD_COUNTERS
"""By name: the text. The connector gives a number to add."""
