"""Names, descriptions and buckets of the connectors' Prometheus metrics.

The names for NIXL and offloading are vLLM's
(`vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py`,
`vllm/distributed/kv_transfer/kv_connector/v1/offloading/metrics.py`); TCP's metrics have the same
names as NIXL's with another prefix.
"""

from typing import Literal, NamedTuple


class KVMetric(NamedTuple):
    """A metric of a connector, which reports the value of a gauge, the increase of a counter, or a
    list of observations for a histogram.

    With a `label`, the connector reports a number for each "name.value".
    """

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    buckets: tuple[float, ...] = ()
    label: str = ""


SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES = tuple(2**power for power in range(11, 35, 2))
DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
OFFLOAD_BYTES = tuple(4**power * 1024 for power in range(12))
KV_METRICS = {
    "nixl_xfer_time_seconds": KVMetric("histogram", "Time of a NIXL transfer.", SECONDS[1:]),
    "nixl_post_time_seconds": KVMetric("histogram", "Time to post a NIXL transfer.", SECONDS),
    "nixl_bytes_transferred": KVMetric("histogram", "Bytes of a NIXL transfer.", BYTES),
    "nixl_num_descriptors": KVMetric("histogram", "Descriptors of a NIXL transfer.", DESCRIPTORS),
    "nixl_num_failed_transfers": KVMetric("counter", "NIXL transfers that failed."),
    "nixl_num_failed_notifications": KVMetric("counter", "NIXL notifications that could not be sent."),
    "nixl_num_kv_expired_reqs": KVMetric("counter", "Requests whose blocks were not read in time."),
    "tcp_xfer_time_seconds": KVMetric("histogram", "Time of a transfer over TCP.", SECONDS[1:]),
    "tcp_bytes_transferred": KVMetric("histogram", "Bytes of a transfer over TCP.", BYTES),
    "tcp_num_failed_transfers": KVMetric("counter", "Transfers over TCP that failed."),
    "tcp_num_kv_expired_reqs": KVMetric("counter", "Requests whose blocks were not read in time."),
    "kv_offload_load_size": KVMetric("histogram", "Bytes of a copy from host memory.", OFFLOAD_BYTES),
    "kv_offload_store_size": KVMetric("histogram", "Bytes of a copy to host memory.", OFFLOAD_BYTES),
    "kv_offload_lookup_sync_delay_seconds": KVMetric(
        "histogram", "Time to look up a request in host memory.", (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)
    ),
    "kv_offload_load_bytes": KVMetric("counter", "Bytes copied from host memory."),
    "kv_offload_load_time": KVMetric("counter", "Seconds spent copying from host memory."),
    "kv_offload_store_bytes": KVMetric("counter", "Bytes copied to host memory."),
    "kv_offload_store_time": KVMetric("counter", "Seconds spent copying to host memory."),
    "kv_offload_allocation_failure": KVMetric("counter", "Steps in which host memory had no room for all blocks."),
    "kv_offload_cpu_cache_usage_perc": KVMetric("gauge", "Fraction of host memory's blocks in use, 0 to 1."),
    "kv_offload_cpu_cache_read_usage_perc": KVMetric("gauge", "Fraction of host memory's blocks being read, 0 to 1."),
    "kv_offload_cpu_cache_write_usage_perc": KVMetric("gauge", "Share of host memory's blocks being written, 0 to 1."),
    "simple_kv_offload_load_blocks": KVMetric("counter", "Blocks copied from host memory."),
    "simple_kv_offload_used_blocks": KVMetric("gauge", "Blocks of host memory that lookups can find."),
    "simple_kv_offload_pending_store_blocks": KVMetric("gauge", "Blocks of host memory that are being written."),
    "simple_kv_offload_save_outcomes": KVMetric("counter", "Blocks to be stored, by outcome.", label="outcome"),
}
