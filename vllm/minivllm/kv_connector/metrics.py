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
    """

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    buckets: tuple[float, ...] = ()


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES = tuple(2**power for power in range(11, 35, 2))
PULL_METRICS = {
    "xfer_time_seconds": KVMetric("histogram", "Time of a transfer.", SECONDS),
    "bytes_transferred": KVMetric("histogram", "Bytes of a transfer.", BYTES),
    "num_failed_transfers": KVMetric("counter", "Transfers that failed."),
    "num_failed_notifications": KVMetric("counter", "Notifications that could not be sent."),
    "num_kv_expired_reqs": KVMetric("counter", "Requests whose blocks were not read in time."),
}
KV_METRICS = {
    **{f"{kind}_{name}": metric for kind in ("nixl", "tcp") for name, metric in PULL_METRICS.items()},
    "kv_offload_load_bytes": KVMetric("counter", "Bytes copied from host memory."),
    "kv_offload_load_time": KVMetric("counter", "Seconds spent copying from host memory."),
    "kv_offload_store_bytes": KVMetric("counter", "Bytes copied to host memory."),
    "kv_offload_store_time": KVMetric("counter", "Seconds spent copying to host memory."),
    "kv_offload_cpu_cache_usage_perc": KVMetric("gauge", "Fraction of host memory's blocks in use, 0 to 1."),
}
