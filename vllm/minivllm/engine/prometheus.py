"""What the engine measures, for Prometheus: vLLM's names, types, labels and buckets.

In vLLM v0.33.0: `vllm/v1/metrics/loggers.py` (`PrometheusStatLogger`).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import fields
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

from minivllm.config.kv_offloading import is_tier
from minivllm.core.messages import EngineCoreReady
from minivllm.core.stats import KVFetchStats, SchedulerStats, SpecDecodingStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.iteration_stats import FinishedRequestStats, IterationStats
from minivllm.kv_connector import metrics as kv_connector_metrics
from minivllm.kv_connector.offload.settings import OffloadSettings

Metric = TypeVar("Metric", bound=MetricWrapperBase)
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
STEP_TOKENS = (1, 8, *(2**power for power in range(4, 15)))
COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in tokens.",
    "prefix_cache_hits": "Prefix cache hits, in tokens.",
    "external_prefix_cache_queries": "Queries of caches outside this engine, in tokens.",
    "external_prefix_cache_hits": "Hits in caches outside this engine, in tokens.",
    "num_preemptions": "Preemptions.",
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts that were cached.",
    "generation_tokens": "Tokens generated.",
    "minivllm:recomputed_tokens": "Tokens of preempted requests that were computed once more.",
}
SPECULATIVE_COUNTERS = {
    "spec_decode_num_drafts": "Drafts that were verified.",
    "spec_decode_num_draft_tokens": "Tokens of drafts.",
    "spec_decode_num_accepted_tokens": "Tokens of drafts that were accepted.",
}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHES = ("device", "host", "p2p", "disk", "external_unspecified")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")


class PrometheusStatLogger:
    """Metrics of all cores, each with its own label `engine`, in a registry of their own."""

    def __init__(self, args: EngineArgs, engines: Sequence[EngineCoreReady], model_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._max_loras, self._lora_info = args.max_loras, _lora_info(registry) if args.enable_lora else None
        self._lora_labels: tuple[str, ...] = ()
        families: dict[str, MetricWrapperBase] = {}
        self._engines = [
            _EngineMetrics(args, engine, model_name, str(index), families, registry)
            for index, engine in enumerate(engines)
        ]

    def record(self, scheduler_stats: SchedulerStats, iteration_stats: IterationStats, engine_idx: int = 0) -> None:
        """Takes in a step of a core. Its scheduler's counts are since the start, the others since the last call."""
        self._engines[engine_idx].record_scheduler(scheduler_stats)
        self._engines[engine_idx].record_iteration(iteration_stats)

    def record_kv_connector(self, stats: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Takes in what a core's KV connector has counted in a step; shown from the first such step on."""
        self._engines[engine_idx].record_kv_connector(stats)

    def record_loras(self, running: Set[str], waiting: Set[str]) -> None:
        """Takes in the adapters in use: only those of now are shown."""
        if self._lora_info is None:
            return
        labels = tuple(map(str, (self._max_loras, ",".join(sorted(running)), ",".join(sorted(waiting)))))
        if labels != self._lora_labels:
            self._lora_info.clear()
        self._lora_labels = labels
        self._lora_info.labels(*labels).set_to_current_time()

    def record_rejection(self, reason: str) -> None:
        """A request was refused since this limit was reached."""
        self._engines[0].record_rejection(reason)


class _EngineMetrics:
    """The metrics of one core: children of `families`, which has all metrics by name."""

    def __init__(
        self,
        args: EngineArgs,
        ready: EngineCoreReady,
        model_name: str,
        engine: str,
        families: dict[str, MetricWrapperBase],
        registry: CollectorRegistry,
    ) -> None:
        self.registry = registry
        self._families = families
        self._labels = {"model_name": model_name, "engine": engine}
        self._seen = dict.fromkeys((*COUNTERS, *SPECULATIVE_COUNTERS), 0)
        transfer = args.kv_transfer
        # What came from other engines is not told by their kind of memory.
        self._external_cache = "host" if is_tier(transfer) else "external_unspecified"
        self._make_gauges(args, ready)
        self._make_counters()
        self._make_speculative_counters(args.speculation.num_speculative_tokens if args.speculation else 0)
        self._make_histograms(_steps_of_1_2_5(ready.limits.max_model_len))

    def record_scheduler(self, scheduler_stats: SchedulerStats) -> None:
        """See `PrometheusStatLogger`."""
        self._running.set(scheduler_stats.num_running_reqs)
        self._waiting.set(scheduler_stats.num_waiting_reqs)
        fetches = scheduler_stats.kv_fetch_stats
        self._waiting_by_reason["capacity"].set(scheduler_stats.num_waiting_reqs - fetches.in_progress)
        self._waiting_by_reason["deferred"].set(fetches.in_progress)
        for stage, gauge in self._fetch_by_stage.items():
            gauge.set(getattr(fetches, stage))
        self._usage.set(scheduler_stats.kv_cache_usage)
        prefix = scheduler_stats.prefix_cache_stats
        self._raise_to("prefix_cache_queries", prefix.queries)
        self._raise_to("prefix_cache_hits", prefix.hits)
        if (external := scheduler_stats.connector_prefix_cache_stats) is not None:
            self._raise_to("external_prefix_cache_queries", external.queries)
            self._raise_to("external_prefix_cache_hits", external.hits)
        self._raise_to("num_preemptions", scheduler_stats.num_preemptions)
        self._raise_to("minivllm:recomputed_tokens", scheduler_stats.num_recomputed_tokens)
        if self._accepted_per_pos:
            self._record_drafts(scheduler_stats.spec_decoding_stats)

    def record_kv_connector(self, stats: Mapping[str, Any]) -> None:
        """See `PrometheusStatLogger`. A connector of somebody else may count what has no name here."""
        for name in stats.keys() & kv_connector_metrics.HISTOGRAMS.keys():
            histogram = self._histogram(name, *kv_connector_metrics.HISTOGRAMS[name])
            for value in stats[name]:
                histogram.observe(value)
        for name in stats.keys() & kv_connector_metrics.COUNTERS.keys():
            counter = self._wrapper(Counter, name, kv_connector_metrics.COUNTERS[name]).labels(**self._labels)
            counter.inc(stats[name])
        for name in stats.keys() & kv_connector_metrics.GAUGES.keys():
            self._gauge(name, kv_connector_metrics.GAUGES[name]).set(stats[name])
        for name, (text, label, values) in kv_connector_metrics.COUNTERS_BY.items():
            counted = {value: stats[f"{name}.{value}"] for value in values if f"{name}.{value}" in stats}
            for value, counter in self._counter_by(name, text, label, tuple(counted)).items() if counted else ():
                counter.inc(counted[value])

    def record_rejection(self, reason: str) -> None:
        """See `PrometheusStatLogger`; no core is to blame."""
        self._rejections[reason].inc()

    def _record_drafts(self, stats: SpecDecodingStats) -> None:
        for name in SPECULATIVE_COUNTERS:
            self._raise_to(name, getattr(stats, name.removeprefix("spec_decode_")))
        per_position = zip(self._accepted_per_pos, stats.num_accepted_tokens_per_pos, strict=False)
        for position, (counter, total) in enumerate(per_position):
            counter.inc(total - self._seen_per_pos[position])
            self._seen_per_pos[position] = total

    def record_iteration(self, stats: IterationStats) -> None:
        """See `PrometheusStatLogger`."""
        cached = min(stats.num_cached_prompt_tokens, stats.num_prompt_tokens)
        self._counters["prompt_tokens"].inc(stats.num_prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(cached)
        self._counters["generation_tokens"].inc(stats.num_generation_tokens)
        external = stats.num_external_prompt_tokens
        # The last token of a prompt that came whole from elsewhere is computed, and counts as external all the same.
        local = max(0, cached - external)
        self._by_source["local_compute"].inc(max(0, stats.num_prompt_tokens - local - external))
        self._by_source["local_cache_hit"].inc(local)
        self._by_source["external_kv_transfer"].inc(external)
        self._by_cache["device"].inc(local)
        self._by_cache[self._external_cache].inc(cached - local)
        if stats.num_prompt_tokens or stats.num_generation_tokens:
            self._iteration_tokens.observe(stats.num_prompt_tokens + stats.num_generation_tokens)
        for seconds in stats.time_to_first_tokens:
            self._time_to_first_token.observe(seconds)
        for seconds in stats.inter_token_latencies:
            self._inter_token_latency.observe(seconds)
        for n, longest in stats.finished_parents:
            self._params_n.observe(n)
            self._max_num_generation_tokens.observe(longest)
        for finished in stats.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        self._success[finished.finish_reason].inc()
        self._prompt_tokens.observe(finished.num_prompt_tokens)
        self._generation_tokens.observe(finished.num_generation_tokens)
        self._params_max_tokens.observe(finished.max_tokens)
        self._kv_computed.observe(max(0, finished.num_prompt_tokens - finished.num_cached_tokens))
        self._preemptions.observe(finished.num_preemptions)
        self._e2e.observe(finished.e2e_latency)
        self._queue.observe(finished.queued_time)
        self._prefill.observe(finished.prefill_time)
        self._decode.observe(finished.decode_time)
        self._inference.observe(finished.inference_time)
        if finished.mean_time_per_output_token is not None:
            self._time_per_output_token.observe(finished.mean_time_per_output_token)

    def _raise_to(self, name: str, total: int) -> None:
        self._counters[name].inc(max(0, total - self._seen[name]))
        self._seen[name] = total

    def _make_speculative_counters(self, num_positions: int) -> None:
        """None without speculation."""
        names = {} if num_positions == 0 else SPECULATIVE_COUNTERS
        self._counters |= {
            name: self._wrapper(Counter, name, text).labels(**self._labels) for name, text in names.items()
        }
        positions = tuple(str(position) for position in range(num_positions))
        name = "spec_decode_num_accepted_tokens_per_pos"
        by_position = self._counter_by(name, "Accepted tokens by position.", "position", positions) if positions else {}
        self._accepted_per_pos = [by_position[position] for position in positions]
        self._seen_per_pos = [0] * num_positions

    def _make_gauges(self, args: EngineArgs, ready: EngineCoreReady) -> None:
        self._running = self._gauge("num_requests_running", "Requests that are computed.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait.")
        self._waiting_by_reason = self._labelled(
            self._wrapper(Gauge, "num_requests_waiting_by_reason", "Requests that wait, by reason.", "reason"),
            "reason",
            ("capacity", "deferred"),
        )
        words = "Requests whose keys and values are to come from elsewhere, by stage."
        self._fetch_by_stage = self._labelled(
            self._wrapper(Gauge, "num_requests_kv_fetch_by_stage", words, "stage"),
            "stage",
            tuple(one.name for one in fields(KVFetchStats)),
        )
        self._usage = self._gauge("kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.")
        tokens = ready.num_gpu_blocks * ready.limits.block_size
        facts = {
            "block_size": ready.limits.block_size,
            "cache_dtype": args.kv_cache_dtype,
            "enable_prefix_caching": args.enable_prefix_caching,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "kv_cache_max_concurrency": tokens / ready.limits.max_model_len,
            "kv_cache_size_tokens": tokens,
            "num_gpu_blocks": ready.num_gpu_blocks,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
        }
        info = self._wrapper(Gauge, "cache_config_info", "Settings of the cache.", *facts)
        info.labels(**self._labels, **{name: str(value) for name, value in facts.items()}).set(1)
        if is_tier(args.kv_transfer):
            self._show_tier(args)

    def _show_tier(self, args: EngineArgs) -> None:
        transfer = args.kv_transfer
        assert transfer is not None
        settings = OffloadSettings.of(transfer.kv_connector_extra_config)
        facts = {one.name: str(getattr(settings, one.name)) for one in fields(settings)}
        for name in ("kv_offload_config_info", "simple_kv_offload_info"):
            info = self._wrapper(Gauge, name, "Settings of the tier below the cache.", *facts)
            info.labels(**self._labels, **facts).set(1)

    def _make_counters(self) -> None:
        self._counters = {
            name: self._wrapper(Counter, name, text).labels(**self._labels) for name, text in COUNTERS.items()
        }
        self._by_source = self._counter_by("prompt_tokens_by_source", "Tokens of prompts.", "source", SOURCES)
        self._by_cache = self._counter_by(
            "prompt_tokens_cached_by_source", "Tokens of prompts that were cached, by where.", "source", CACHES
        )
        self._success = self._counter_by("request_success", "Ended requests.", "finished_reason", FINISH_REASONS)
        rejections = self._family(Counter, "admission_rejections", "Refused requests.", ["model_name", "reason"])
        self._rejections = {
            reason: rejections.labels(model_name=self._labels["model_name"], reason=reason) for reason in REJECTIONS
        }

    def _make_histograms(self, counts: tuple[int, ...]) -> None:
        make = self._histogram
        self._prompt_tokens = make("request_prompt_tokens", "Tokens of a request's prompt.", counts)
        self._generation_tokens = make("request_generation_tokens", "Tokens that a request generated.", counts)
        self._iteration_tokens = make("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS)
        self._max_num_generation_tokens = make(
            "request_max_num_generation_tokens", "Tokens of the longest of n completions.", counts
        )
        self._params_n = make("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._params_max_tokens = make("request_params_max_tokens", "max_tokens of a request.", counts)
        self._kv_computed = make("request_prefill_kv_computed_tokens", "Tokens of a prompt not cached.", counts)
        self._preemptions = make("request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20))
        self._time_to_first_token = make("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_SECONDS)
        self._inter_token_latency = make("inter_token_latency_seconds", "Time between tokens.", TOKEN_SECONDS)
        self._time_per_output_token = make(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", TOKEN_SECONDS
        )
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS)
        self._queue = make("request_queue_time_seconds", "From arrival to the first step.", REQUEST_SECONDS)
        self._inference = make("request_inference_time_seconds", "First step to last token.", REQUEST_SECONDS)
        self._prefill = make("request_prefill_time_seconds", "First step to first token.", REQUEST_SECONDS)
        self._decode = make("request_decode_time_seconds", "First to last token.", REQUEST_SECONDS)

    def _wrapper(self, kind: type[Metric], name: str, text: str, *labels: str) -> Metric:
        return self._family(kind, name, text, [*self._labels, *labels])

    def _family(self, kind: type[Metric], name: str, text: str, labels: Sequence[str], **settings: Any) -> Metric:
        """The metric of this name, which all cores share; vLLM's unless it says whose it is."""
        if name not in self._families:
            full_name = name if ":" in name else f"vllm:{name}"
            self._families[name] = kind(full_name, text, labels, registry=self.registry, **settings)
        found = self._families[name]
        assert isinstance(found, kind)
        return found

    def _labelled(self, metric: Metric, label: str, values: tuple[str, ...]) -> Mapping[str, Metric]:
        return {value: metric.labels(**self._labels, **{label: value}) for value in values}

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._wrapper(Gauge, name, text).labels(**self._labels)

    def _counter_by(self, name: str, text: str, label: str, values: tuple[str, ...]) -> Mapping[str, Counter]:
        return self._labelled(self._wrapper(Counter, name, text, label), label, values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._family(Histogram, name, text, list(self._labels), buckets=buckets).labels(**self._labels)


def _lora_info(registry: CollectorRegistry) -> Gauge:
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    text = "When adapters were last in use, and which."
    return Gauge("vllm:lora_requests_info", text, labels, registry=registry)


def _steps_of_1_2_5(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
