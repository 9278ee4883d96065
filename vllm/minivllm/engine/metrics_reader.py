"""Metrics as plain values, for callers that do not scrape Prometheus.

In vLLM v0.33.0: `vllm/v1/metrics/reader.py` (`get_metrics_snapshot`).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.samples import Sample

PREFIX = "vllm:"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""A counter for each position of a draft, which is shown as one `Vector`."""


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A total since the start."""

    value: int


@dataclass
class Vector(Metric):
    """Totals since the start, by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Histogram(Metric):
    """Observed values: their number, their sum, and for each bound the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return the current metrics of a registry."""
    return [metric for family in registry.collect() if family.name.startswith(PREFIX) for metric in _values(family)]


def _values(family: PrometheusMetric) -> Iterator[Metric]:
    by_labels = defaultdict[tuple, list[Sample]](list)
    for sample in family.samples:
        # prometheus_client adds the time at which a counter was made.
        if not sample.name.endswith("_created"):
            # Buckets and positions are values of one metric here, not metrics of their own.
            labels = tuple((name, value) for name, value in sample.labels.items() if name not in ("le", "position"))
            by_labels[labels].append(sample)
    return (_value(family, dict(labels), samples) for labels, samples in by_labels.items())


def _value(family: PrometheusMetric, labels: dict[str, str], samples: list[Sample]) -> Metric:
    if family.type == "gauge":
        return Gauge(family.name, labels, samples[0].value)
    if family.name == PER_POSITION:
        in_order = sorted(samples, key=lambda sample: int(sample.labels["position"]))
        return Vector(family.name, labels, [int(sample.value) for sample in in_order])
    if family.type == "counter":
        return Counter(family.name, labels, int(samples[0].value))
    buckets = {sample.labels["le"]: int(sample.value) for sample in samples if "le" in sample.labels}
    totals = {sample.name.removeprefix(family.name): sample.value for sample in samples}
    return Histogram(family.name, labels, int(totals["_count"]), totals["_sum"], buckets)
