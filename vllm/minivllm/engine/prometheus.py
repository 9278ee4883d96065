"""The engine's metrics for Prometheus: vLLM's names, types, labels and buckets.

`METRICS` defines the metrics, and `PrometheusStatLogger` fills them in. In vLLM v0.33.0:
`vllm/v1/metrics/loggers.py` (`PrometheusStatLogger`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from minivllm.core.engine_messages import EngineCoreReady
from minivllm.core.stats import PrefixCacheStats, SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.iteration_stats import IterationStats
from minivllm.kv_connector.metrics import KV_METRICS

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
UP_TO_MAX_MODEL_LEN = ()
"""Stands for 1, 2, 5, 10, 20, 50, … up to the longest request."""
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
NO_LOOKUPS = PrefixCacheStats()


class Metric(NamedTuple):
    """A metric, and the function that reads its value.

    `read` gets the scheduler's state after a step, and the front end's measurements of the requests
    in it. It returns the current value (gauge), the total since the start (total), the increase
    (counter), or a list of observations (histogram, whose buckets have these upper bounds).
    """

    kind: Literal["gauge", "total", "counter", "histogram"]
    text: str
    read: Callable[[SchedulerStats, IterationStats], Any]
    buckets: tuple[float, ...] = ()


def _of_finished(field: str) -> Callable[[SchedulerStats, IterationStats], list[float]]:
    """Return a function that reads this field of each finished request, skipping None."""

    def read(_: SchedulerStats, step: IterationStats) -> list[float]:
        values = (getattr(request, field) for request in step.finished_requests)
        return [value for value in values if value is not None]

    return read


METRICS = {
    "num_requests_running": Metric("gauge", "Requests being computed.", lambda s, _: s.num_running_reqs),
    "num_requests_waiting": Metric("gauge", "Requests waiting.", lambda s, _: s.num_waiting_reqs),
    "kv_cache_usage_perc": Metric("gauge", "Fraction of blocks in use, 0 to 1.", lambda s, _: s.kv_cache_usage),
    "prefix_cache_queries":
        Metric("total", "Prefix cache queries, in tokens.", lambda s, _: s.prefix_cache_stats.queries),
    "prefix_cache_hits": Metric("total", "Prefix cache hits, in tokens.", lambda s, _: s.prefix_cache_stats.hits),
    "external_prefix_cache_queries":
        Metric("total", "Queries of other caches, in tokens.",
               lambda s, _: (s.connector_prefix_cache_stats or NO_LOOKUPS).queries),
    "external_prefix_cache_hits":
        Metric("total", "Hits in other caches, in tokens.",
               lambda s, _: (s.connector_prefix_cache_stats or NO_LOOKUPS).hits),
    "num_preemptions": Metric("total", "Preemptions.", lambda s, _: s.num_preemptions),
    "minivllm:recomputed_tokens":
        Metric("total", "Tokens of preempted requests that were recomputed.", lambda s, _: s.num_recomputed_tokens),
    "prompt_tokens": Metric("counter", "Prompt tokens.", lambda _, step: step.num_prompt_tokens),
    "generation_tokens": Metric("counter", "Tokens generated.", lambda _, step: step.num_generation_tokens),
    "iteration_tokens_total":
        Metric("histogram", "Tokens per step.", lambda _, step: [step.num_tokens] if step.num_tokens else [],
               STEP_TOKENS),
    "time_to_first_token_seconds":
        Metric("histogram", "Time to first token.", lambda _, step: step.time_to_first_tokens, FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds":
        Metric("histogram", "Time between tokens.", lambda _, step: step.inter_token_latencies, TOKEN_SECONDS),
    "request_params_n":
        Metric("histogram", "The parameter n of each request.", lambda _, step: step.finished_parents,
               (1, 2, 5, 10, 20)),
    **{name: Metric("histogram", text, _of_finished(field), buckets) for name, field, text, buckets in (
        ("request_prompt_tokens", "num_prompt_tokens", "Prompt tokens per request.", UP_TO_MAX_MODEL_LEN),
        ("request_generation_tokens", "num_generation_tokens", "Tokens generated.", UP_TO_MAX_MODEL_LEN),
        ("request_params_max_tokens", "max_tokens", "max_tokens per request.", UP_TO_MAX_MODEL_LEN),
        ("request_num_preemptions", "num_preemptions", "Preemptions per request.", (1, 2, 3, 4, 5, 10, 20)),
        ("e2e_request_latency_seconds", "e2e_latency", "From arrival to the last token.", REQUEST_SECONDS),
        ("request_queue_time_seconds", "queued_time", "From arrival to the first step.", REQUEST_SECONDS),
        ("request_inference_time_seconds", "inference_time", "First step to last token.", REQUEST_SECONDS),
        ("request_prefill_time_seconds", "prefill_time", "First step to first token.", REQUEST_SECONDS),
        ("request_decode_time_seconds", "decode_time", "First to last token.", REQUEST_SECONDS),
        ("request_time_per_output_token_seconds", "mean_time_per_output_token", "Mean time between a request's tokens.",
         TOKEN_SECONDS),
    )},
}  # fmt: skip
DRAFT_METRICS = {
    f"spec_decode_{field}": Metric("total", text, lambda s, _, field=field: getattr(s.spec_decoding_stats, field))
    for field, text in (
        ("num_drafts", "Drafts that were verified."),
        ("num_draft_tokens", "Draft tokens."),
        ("num_accepted_tokens", "Draft tokens that were accepted."),
    )
}
"""The metrics of an engine that drafts."""
KINDS = {"gauge": Gauge, "total": Counter, "counter": Counter, "histogram": Histogram}


class PrometheusStatLogger:
    """Metrics of all cores, each labelled with its `engine`, in a separate registry."""

    def __init__(self, args: EngineArgs, engines: Sequence[EngineCoreReady], model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model_name
        self._families: dict[str, Any] = {}
        self._last_total: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._metrics = METRICS | (DRAFT_METRICS if args.speculation is not None else {})
        for index, engine in enumerate(engines):
            self._make_all(index, args, engine)
        labels = ("model_name", "reason")
        self._rejections = Counter("vllm:admission_rejections", "Refused.", labels, registry=self.registry)
        self._rejections.labels(model_name, "max_num_queued_reqs")  # exposed with the value zero
        self._max_loras = args.max_loras
        self._lora_info = None
        if args.enable_lora:
            labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
            self._lora_info = Gauge("vllm:lora_requests_info", "Adapters in use.", labels, registry=self.registry)

    def record(self, scheduler_stats: SchedulerStats, iteration_stats: IterationStats, engine_idx: int = 0) -> None:
        """Record a step of a core."""
        for name, metric in self._metrics.items():
            value = metric.read(scheduler_stats, iteration_stats)
            if metric.kind == "total":
                # Prometheus counts increases. A total can fall when the core starts over.
                last, self._last_total[name, engine_idx] = self._last_total[name, engine_idx], value
                value = max(0, value - last)
            _put(self._labelled(name, engine_idx), metric.kind, value)
        for finished in iteration_stats.finished_requests:
            self._labelled("request_success", engine_idx, finished.finish_reason).inc()

    def record_kv_connector(self, stats: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Record what a core's KV connector counted in a step; the metrics are exposed from the
        first such step on.

        Counts of third-party connectors that have no name here are ignored.
        """
        for name, value in stats.items():
            metric = KV_METRICS.get(name)
            if metric is not None:
                self._add_family(metric.kind, name, metric.text, metric.buckets)
                _put(self._labelled(name, engine_idx), metric.kind, value)

    def record_loras(self, running: Set[str], waiting: Set[str]) -> None:
        """Record which adapters are in use; adapters of earlier steps are no longer exposed."""
        if self._lora_info is not None:
            # The labels are the adapters in use: without this, every combination ever seen would
            # stay.
            self._lora_info.clear()
            labels = (str(self._max_loras), ",".join(sorted(running)), ",".join(sorted(waiting)))
            self._lora_info.labels(*labels).set_to_current_time()

    def record_rejection(self, reason: str) -> None:
        """Count a request that was rejected because this limit was reached."""
        self._rejections.labels(self._model, reason).inc()

    def _make_all(self, index: int, args: EngineArgs, engine: EngineCoreReady) -> None:
        """Create all metrics of a core, so that they are exposed with the value zero."""
        for name, metric in self._metrics.items():
            buckets = metric.buckets or _steps_of_1_2_5(engine.limits.max_model_len)
            self._add_family(metric.kind, name, metric.text, buckets)
            self._labelled(name, index)
        self._add_family("counter", "request_success", "Ended requests.", labels=["finished_reason"])
        for reason in FINISH_REASONS:
            self._labelled("request_success", index, reason)
        num_tokens = engine.num_gpu_blocks * engine.limits.block_size
        settings = {
            "block_size": engine.limits.block_size,
            "cache_dtype": args.kv_cache_dtype,
            "enable_prefix_caching": args.enable_prefix_caching,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "kv_cache_max_concurrency": num_tokens / engine.limits.max_model_len,
            "kv_cache_size_tokens": num_tokens,
            "num_gpu_blocks": engine.num_gpu_blocks,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
        }
        self._add_family("gauge", "cache_config_info", "Settings.", labels=settings)
        self._labelled("cache_config_info", index, *settings.values()).set(1)

    def _add_family(
        self, kind: str, name: str, text: str, buckets: tuple[float, ...] = (), labels: Iterable[str] = ()
    ) -> None:
        """Create the metric of this name, which all cores share, unless it exists. The name gets
        vLLM's prefix unless it has its own.
        """
        if name not in self._families:
            full_name = name if ":" in name else f"vllm:{name}"
            settings = {"buckets": buckets} if kind == "histogram" else {}
            names = ("model_name", "engine", *labels)
            self._families[name] = KINDS[kind](full_name, text, names, registry=self.registry, **settings)

    def _labelled(self, name: str, engine: int, *labels: object) -> Any:
        """Return one core's share of a metric, which is exposed after the first call."""
        return self._families[name].labels(self._model, engine, *labels)


def _put(child: Any, kind: str, value: Any) -> None:
    """Set a gauge, increase a counter, or add observations to a histogram."""
    if kind == "gauge":
        child.set(value)
    elif kind == "histogram":
        for observation in value:
            child.observe(observation)
    else:
        child.inc(value)


def _steps_of_1_2_5(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
