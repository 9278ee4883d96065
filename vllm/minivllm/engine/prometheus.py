"""What the engine measures, for Prometheus: vLLM's names, types, labels and buckets.

The tables say what there is; below, `PrometheusStatLogger` fills it in. In vLLM v0.33.0: `vllm/v1/metrics/loggers.py`
(`PrometheusStatLogger`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector

from minivllm.config.kv_offloading import is_tier
from minivllm.core.messages import EngineCoreReady
from minivllm.core.stats import KVFetchStats, PrefixCacheStats, SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.iteration_stats import IterationStats
from minivllm.kv_connector import metrics as kv_metrics
from minivllm.kv_connector.offload.settings import OffloadSettings

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

NONE = PrefixCacheStats()
SCHEDULER = {
    "num_requests_running": (Gauge, "Requests that are computed.", lambda s: s.num_running_reqs),
    "num_requests_waiting": (Gauge, "Requests that wait.", lambda s: s.num_waiting_reqs),
    'num_requests_waiting_by_reason{reason="capacity"}':
        (Gauge, "Requests that wait, by reason.", lambda s: s.num_waiting_reqs - s.kv_fetch_stats.in_progress),
    'num_requests_waiting_by_reason{reason="deferred"}':
        (Gauge, "Requests that wait, by reason.", lambda s: s.kv_fetch_stats.in_progress),
    **{f'num_requests_kv_fetch_by_stage{{stage="{one.name}"}}':
        (Gauge, "Requests with remote keys and values, by stage.", lambda s, at=one.name: getattr(s.kv_fetch_stats, at))
        for one in fields(KVFetchStats)},
    "kv_cache_usage_perc": (Gauge, "Share of the cache's blocks in use, 0 to 1.", lambda s: s.kv_cache_usage),
    "prefix_cache_queries": (Counter, "Prefix cache queries, in tokens.", lambda s: s.prefix_cache_stats.queries),
    "prefix_cache_hits": (Counter, "Prefix cache hits, in tokens.", lambda s: s.prefix_cache_stats.hits),
    "external_prefix_cache_queries":
        (Counter, "Queries of other caches, in tokens.", lambda s: (s.connector_prefix_cache_stats or NONE).queries),
    "external_prefix_cache_hits":
        (Counter, "Hits in other caches, in tokens.", lambda s: (s.connector_prefix_cache_stats or NONE).hits),
    "num_preemptions": (Counter, "Preemptions.", lambda s: s.num_preemptions),
    "minivllm:recomputed_tokens":
        (Counter, "Tokens of preempted requests that were computed once more.", lambda s: s.num_recomputed_tokens),
}  # fmt: skip
"""Name to type, help text and value; a counter's value is its total since the start."""
SPECULATIVE = {
    f"spec_decode_{name}": (Counter, text, lambda s, name=name: getattr(s.spec_decoding_stats, name))
    for name, text in {
        "num_drafts": "Drafts that were verified.",
        "num_draft_tokens": "Tokens of drafts.",
        "num_accepted_tokens": "Tokens of drafts that were accepted.",
    }.items()
}
ITERATION = {
    "prompt_tokens": ("Tokens of prompts.", lambda s: s.num_prompt_tokens),
    "prompt_tokens_cached": ("Tokens of prompts that were cached.", lambda s: s.num_local_tokens + s.num_remote_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.num_generation_tokens),
    'prompt_tokens_by_source{source="local_compute"}': ("Tokens of prompts.", lambda s: s.num_computed_tokens),
    'prompt_tokens_by_source{source="local_cache_hit"}': ("Tokens of prompts.", lambda s: s.num_local_tokens),
    'prompt_tokens_by_source{source="external_kv_transfer"}':
        ("Tokens of prompts.", lambda s: s.num_external_prompt_tokens),
    'prompt_tokens_cached_by_source{source="device"}':
        ("Tokens of prompts that were cached, by where.", lambda s: s.num_local_tokens),
}  # fmt: skip
"""Name to help text and the increase since the last call."""
EXTERNAL_CACHES = ("host", "p2p", "disk", "external_unspecified")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens of a step.", STEP_TOKENS, lambda s: [s.num_tokens] if s.num_tokens else []),
    "time_to_first_token_seconds": ("Time to first token.", FIRST_TOKEN_SECONDS, lambda s: s.time_to_first_tokens),
    "inter_token_latency_seconds": ("Time between tokens.", TOKEN_SECONDS, lambda s: s.inter_token_latencies),
    "request_params_n": ("n of a request.", (1, 2, 5, 10, 20), lambda s: [n for n, _ in s.finished_parents]),
    "request_max_num_generation_tokens":
        ("Tokens of the longest of n.", UP_TO_MAX_MODEL_LEN, lambda s: [most for _, most in s.finished_parents]),
}  # fmt: skip
"""Name to help text, upper bounds of the buckets, and the values to observe."""
FINISHED = {
    "request_prompt_tokens": ("num_prompt_tokens", "Tokens of the prompt.", UP_TO_MAX_MODEL_LEN),
    "request_generation_tokens": ("num_generation_tokens", "Tokens generated.", UP_TO_MAX_MODEL_LEN),
    "request_params_max_tokens": ("max_tokens", "max_tokens of a request.", UP_TO_MAX_MODEL_LEN),
    "request_prefill_kv_computed_tokens": ("num_computed_tokens", "Tokens of it not cached.", UP_TO_MAX_MODEL_LEN),
    "request_num_preemptions": ("num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)),
    "e2e_request_latency_seconds": ("e2e_latency", "From arrival to the last token.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("queued_time", "From arrival to the first step.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("inference_time", "First step to last token.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("prefill_time", "First step to first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("decode_time", "First to last token.", REQUEST_SECONDS),
    "request_time_per_output_token_seconds": (
        "mean_time_per_output_token", "Mean time between a request's tokens.", TOKEN_SECONDS,
    ),
}  # fmt: skip
"""By name: the field of `FinishedRequestStats`, the text, and the upper bounds of the buckets."""


class PrometheusStatLogger:
    """Metrics of all cores, each with its own label `engine`, in a registry of their own."""

    def __init__(self, args: EngineArgs, engines: Sequence[EngineCoreReady], model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model_name
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, int], Any] = {}
        self._seen: defaultdict[tuple[str, int], float] = defaultdict(float)
        self._external = _key("prompt_tokens_cached_by_source", "source", EXTERNAL_CACHES[-1])
        if is_tier(args.kv_transfer):
            self._external = _key("prompt_tokens_cached_by_source", "source", "host")
        self._scheduler: dict[str, tuple[Any, str, Callable[[SchedulerStats], float]]] = SCHEDULER
        if args.speculation is not None:
            self._scheduler = SCHEDULER | SPECULATIVE | _accepted_by_position(args.speculation.num_speculative_tokens)
        for index, engine in enumerate(engines):
            self._make_all(index, engine.limits.max_model_len)
            self._show_settings(index, args, engine)
        rejections = Counter("vllm:admission_rejections", "Refused.", ["model_name", "reason"], registry=self.registry)
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in REJECTIONS}
        self._max_loras, self._lora_info = args.max_loras, None
        if args.enable_lora:
            labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
            self._lora_info = Gauge("vllm:lora_requests_info", "Adapters in use.", labels, registry=self.registry)

    def record(self, scheduler_stats: SchedulerStats, iteration_stats: IterationStats, engine_idx: int = 0) -> None:
        """Take in a step of a core. Its scheduler's counts are since the start, the others since the last call."""
        for name, (kind, _, read) in self._scheduler.items():
            key, value = (name, engine_idx), read(scheduler_stats)
            if kind is Gauge:
                self._children[key].set(value)
            else:
                self._children[key].inc(max(0, value - self._seen[key]))
                self._seen[key] = value
        for name, (_, read) in ITERATION.items():
            self._children[name, engine_idx].inc(read(iteration_stats))
        self._children[self._external, engine_idx].inc(iteration_stats.num_remote_tokens)
        for name, (_, _, read) in HISTOGRAMS.items():
            for value in read(iteration_stats):
                self._children[name, engine_idx].observe(value)
        for finished in iteration_stats.finished_requests:
            self._children[_key("request_success", "finished_reason", finished.finish_reason), engine_idx].inc()
            for name, (field, *_) in FINISHED.items():
                if (value := getattr(finished, field)) is not None:
                    self._children[name, engine_idx].observe(value)

    def record_kv_connector(self, stats: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Take in what a core's KV connector has counted in a step; shown from the first such step on.

        A connector of somebody else may count what has no name here.
        """
        for name, value in stats.items():
            family, _, label_value = name.partition(".")
            if name in kv_metrics.HISTOGRAMS:
                text, buckets = kv_metrics.HISTOGRAMS[name]
                for observed in value:
                    self._child(Histogram, engine_idx, name, text, buckets=buckets).observe(observed)
            elif name in kv_metrics.COUNTERS:
                self._child(Counter, engine_idx, name, kv_metrics.COUNTERS[name]).inc(value)
            elif name in kv_metrics.GAUGES:
                self._child(Gauge, engine_idx, name, kv_metrics.GAUGES[name]).set(value)
            elif family in kv_metrics.COUNTERS_BY:
                text, label, _ = kv_metrics.COUNTERS_BY[family]
                self._child(Counter, engine_idx, _key(family, label, label_value), text).inc(value)

    def record_loras(self, running: Set[str], waiting: Set[str]) -> None:
        """Take in the adapters in use: only those of now are shown."""
        if self._lora_info is not None:
            self._lora_info.clear()
            labels = (str(self._max_loras), ",".join(sorted(running)), ",".join(sorted(waiting)))
            self._lora_info.labels(*labels).set_to_current_time()

    def record_rejection(self, reason: str) -> None:
        """Count a request that was refused since this limit was reached."""
        self._rejections[reason].inc()

    def _make_all(self, index: int, max_model_len: int) -> None:
        """Show all metrics of a core, which are zero as yet."""
        for name, (kind, text, _) in self._scheduler.items():
            self._child(kind, index, name, text)
        for name, (text, _) in ITERATION.items():
            self._child(Counter, index, name, text)
        for cache in EXTERNAL_CACHES:
            self._child(Counter, index, _key("prompt_tokens_cached_by_source", "source", cache), "")
        for reason in FINISH_REASONS:
            self._child(Counter, index, _key("request_success", "finished_reason", reason), "Ended requests.")
        finished = {name: (text, buckets, None) for name, (_, text, buckets) in FINISHED.items()}
        for name, (text, buckets, _) in (HISTOGRAMS | finished).items():
            self._child(Histogram, index, name, text, buckets=buckets or _steps_of_1_2_5(max_model_len))

    def _show_settings(self, index: int, args: EngineArgs, engine: EngineCoreReady) -> None:
        tokens = engine.num_gpu_blocks * engine.limits.block_size
        names = ("enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override")
        facts = {name: getattr(args, name) for name in names} | {
            "block_size": engine.limits.block_size,
            "cache_dtype": args.kv_cache_dtype,
            "kv_cache_max_concurrency": tokens / engine.limits.max_model_len,
            "kv_cache_size_tokens": tokens,
            "num_gpu_blocks": engine.num_gpu_blocks,
        }
        shown = {"cache_config_info": facts}
        if args.kv_transfer is not None and is_tier(args.kv_transfer):
            tier = asdict(OffloadSettings.of(args.kv_transfer.kv_connector_extra_config))
            shown |= {"kv_offload_config_info": tier, "simple_kv_offload_info": tier}
        for name, settings in shown.items():
            labels = {key: str(value) for key, value in settings.items()}
            self._labelled(self._family(Gauge, name, "Settings.", labels), index, labels).set(1)

    def _child(self, kind: Any, engine: int, key: str, text: str, **settings: Any) -> Any:
        """Return one core's share of a metric, made when it is first asked for."""
        if (key, engine) not in self._children:
            name, _, pair = key.partition("{")
            label, _, value = pair.strip('}"').partition('="')
            labels = {label: value} if label else {}
            family = self._family(kind, name, text, labels, **settings)
            self._children[key, engine] = self._labelled(family, engine, labels)
        return self._children[key, engine]

    def _family(self, kind: Any, name: str, text: str, labels: Iterable[str], **settings: Any) -> Any:
        """Return the metric of this name, which all cores share; vLLM's unless it says whose it is."""
        if name not in self._families:
            full_name, labels = name if ":" in name else f"vllm:{name}", ("model_name", "engine", *labels)
            self._families[name] = kind(full_name, text, labels, registry=self.registry, **settings)
        return self._families[name]

    def _labelled(self, family: Any, engine: int, labels: Mapping[str, str]) -> Any:
        return family.labels(model_name=self._model, engine=str(engine), **labels)


def _key(name: str, label: str, value: str) -> str:
    return f'{name}{{{label}="{value}"}}'


def _accepted_by_position(num_positions: int) -> dict[str, Any]:
    def read(position: int) -> Callable[[SchedulerStats], int]:
        return lambda stats: sum(stats.spec_decoding_stats.num_accepted_tokens_per_pos[position : position + 1])

    return {
        _key("spec_decode_num_accepted_tokens_per_pos", "position", str(position)):
        (Counter, "Accepted tokens by position.", read(position)) for position in range(num_positions)
    }  # fmt: skip


def _steps_of_1_2_5(most: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to `most`."""
    steps = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
