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
        self.begin()

    def begin(self) -> None:
        """Starts counting, now: the engine was idle."""
        self._since = time.monotonic()
        self._prompt_tokens = self._generation_tokens = 0

    def observe(self, prompt_tokens: int, generation_tokens: int, stats: SchedulerStats) -> None:
        """Counts a step's tokens, those of prompts that were computed and those generated; logs when it is time."""
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        seconds = time.monotonic() - self._since
        if seconds >= SECONDS:
            self._say(seconds, stats)
            self.begin()

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
