"""Logs throughput, running and waiting requests and cache usage every few seconds of work.

In vLLM v0.33.0: `vllm/v1/metrics/loggers.py` (`LoggingStatLogger`).
"""

import time

from minivllm.core.stats import SchedulerStats
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS = 5.0


class ThroughputLog:
    """Counts tokens between two log lines. Idle time is excluded, so it does not look like low throughput."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._prompt_tokens = self._generation_tokens = 0

    def observe(self, prompt_tokens: int, generation_tokens: int, stats: SchedulerStats) -> None:
        """Adds a step's prompt and generated tokens, and logs a line if it is time."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        if now - self._since >= SECONDS:
            self._say(now - self._since, stats)
            self._since, self._prompt_tokens, self._generation_tokens = now, 0, 0
        if not stats.num_running_reqs and not stats.num_waiting_reqs:
            self._since, self._prompt_tokens, self._generation_tokens = None, 0, 0

    def _say(self, seconds: float, stats: SchedulerStats) -> None:
        prefix = stats.prefix_cache_stats
        logger.info(
            "Prompt %.1f tokens/s, generation %.1f tokens/s; %d running, %d waiting; KV cache usage %.1f%%, "
            "prefix cache hit rate %.1f%%",
            self._prompt_tokens / seconds,
            self._generation_tokens / seconds,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            100 * prefix.hits / max(1, prefix.queries),
        )
