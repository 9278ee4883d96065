"""What the proxy measures, for Prometheus: its requests on each server, and how long each phase takes."""

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from minivllm.engine.prometheus import FIRST_TOKEN_SECONDS, REQUEST_SECONDS
from minivllm.entrypoints.proxy.pool import Upstream

OUTCOMES = ("answered", "refused", "failed", "left")
"""A server's reply below 400, from 400 to 499, above or none at all; and clients that left before it."""
PHASES = {"prefill": FIRST_TOKEN_SECONDS, "decode_wait": FIRST_TOKEN_SECONDS, "decode": REQUEST_SECONDS}
WAYS = ("two_steps", "not_kept", "several_prompts", "prompt_logprobs")
"""How requests go: over both servers; or the decode server computes the prompt, and why."""


class ProxyMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self, upstreams: Iterable[Upstream]) -> None:
        self.registry = CollectorRegistry()
        labels = ["role", "upstream"]
        self._requests = Counter(
            "minivllm:proxy_requests", "Requests that a server was sent.", [*labels, "outcome"], registry=self.registry
        )
        self._ways = Counter("minivllm:proxy_ways", "Clients' requests.", ["way"], registry=self.registry)
        for way in WAYS:
            self._ways.labels(way)
        self._seconds = {
            phase: Histogram(f"minivllm:proxy_{phase}_seconds", text, buckets=PHASES[phase], registry=self.registry)
            for phase, text in (
                ("prefill", "A prefill server's whole answer."),
                ("decode_wait", "To the first byte of a decode server's answer."),
                ("decode", "From there to its last byte."),
            )
        }
        gauges = {
            "requests_in_flight": ("Requests under way.", lambda one: one.num_requests),
            "prompt_tokens_in_flight": ("About how many tokens their prompts have.", lambda one: one.num_tokens),
            "upstream_healthy": ("Whether it is asked.", lambda one: one.trouble is None),
        }
        for name, (text, value) in gauges.items():
            gauge = Gauge(f"minivllm:proxy_{name}", text, labels, registry=self.registry)
            for one in upstreams:
                gauge.labels(one.role, one.url).set_function(lambda one=one, value=value: value(one))

    def count_way(self, way: str) -> None:
        """A client's request goes this way."""
        self._ways.labels(way).inc()

    def count_request(self, upstream: Upstream, outcome: str) -> None:
        """A request on this server has ended so."""
        self._requests.labels(upstream.role, upstream.url, outcome).inc()

    def observe(self, phase: str, seconds: float) -> None:
        """A phase of a request has taken so long."""
        self._seconds[phase].observe(seconds)


class Turn:
    """A request's time on a server, from its making to `end`."""

    def __init__(self, upstream: Upstream, num_tokens: int, metrics: ProxyMetrics) -> None:
        self.upstream = upstream
        self.began = time.monotonic()
        self.outcome = "left"
        self._num_tokens = num_tokens
        self._metrics = metrics
        self._ended = False
        upstream.num_requests += 1
        upstream.num_tokens += num_tokens

    def answered(self, status: int) -> None:
        """The server has replied with this status."""
        self.outcome = "answered" if status < 400 else "refused" if status < 500 else "failed"

    def observe(self, phase: str) -> None:
        """This phase ends now; the next one begins."""
        now = time.monotonic()
        self._metrics.observe(phase, now - self.began)
        self.began = now

    def end(self) -> None:
        """Counts it; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self.upstream.num_requests -= 1
            self.upstream.num_tokens -= self._num_tokens
            self._metrics.count_request(self.upstream, self.outcome)
