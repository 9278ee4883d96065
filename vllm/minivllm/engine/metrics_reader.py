"""Metrics as plain values, for those who do not scrape them.

In vLLM v0.33.0: `vllm/v1/metrics/reader.py` (`get_metrics_snapshot`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric

PREFIX = "vllm:"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
"""A counter for each position of a draft, which is shown as one `Vector`."""


@dataclass
class Metric:
    """One metric of one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count since the start."""

    value: int


@dataclass
class Vector(Metric):
    """Counts since the start, by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """The value now."""

    value: float


@dataclass
class Histogram(Metric):
    """Observed values: how many, their sum, and how many at most as large as each bound."""

    count: int
    sum: float
    buckets: dict[str, int]


def get_metrics_snapshot(registry: CollectorRegistry) -> list[Metric]:
    """Return the metrics of a registry as they are now."""
    return [found for family in registry.collect() if family.name.startswith(PREFIX) for found in _values(family)]


def _values(family: PrometheusMetric) -> Iterator[Metric]:
    if family.type == "gauge":
        yield from (Gauge(family.name, sample.labels, sample.value) for sample in family.samples)
    elif family.type == "histogram":
        yield from _histograms(family)
    elif family.name == PER_POSITION:
        yield from _vectors(family)
    elif family.type == "counter":
        counts = (sample for sample in family.samples if sample.name == f"{family.name}_total")
        yield from (Counter(family.name, sample.labels, int(sample.value)) for sample in counts)


def _histograms(family: PrometheusMetric) -> Iterator[Histogram]:
    found: dict[tuple, Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        one = found.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            one.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            one.sum = sample.value
    yield from found.values()


def _vectors(family: PrometheusMetric) -> Iterator[Vector]:
    found: dict[tuple, Vector] = {}
    for sample in family.samples:
        if not sample.name.endswith("_total"):
            continue
        labels = {name: value for name, value in sample.labels.items() if name != "position"}
        one = found.setdefault(tuple(labels.items()), Vector(family.name, labels, []))
        position = int(sample.labels["position"])
        one.values += [0] * (position + 1 - len(one.values))
        one.values[position] = int(sample.value)
    yield from found.values()
