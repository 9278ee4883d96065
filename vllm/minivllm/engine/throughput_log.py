"""Logs throughput, running and waiting requests, cache usage and the fate of drafts every few seconds of work.

In vLLM v0.33.0: `vllm/v1/metrics/loggers.py` (`LoggingStatLogger`), `vllm/v1/spec_decode/metrics.py`
(`SpecDecodingLogging`).
"""

import time

from minivllm.core.stats import SchedulerStats, SpecDecodingStats
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS = 5.0


class ThroughputLog:
    """Counts tokens between two log lines. Idle time is excluded, so it does not look like low throughput."""

    def __init__(self) -> None:
        self._drafts = SpecDecodingStats()
        self.begin()

    def begin(self) -> None:
        """Start counting, now: the engine was idle."""
        self._since = time.monotonic()
        self._prompt_tokens = self._generation_tokens = 0

    def observe(self, prompt_tokens: int, generation_tokens: int, stats: SchedulerStats) -> None:
        """Count a step's tokens, those of prompts that were computed and those generated; logs when it is time."""
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
        # Counts are since the start, the line is about the last seconds.
        drafts = stats.spec_decoding_stats.since(self._drafts)
        self._drafts = stats.spec_decoding_stats
        if drafts.num_drafts:
            self._say_drafts(seconds, drafts)

    @staticmethod
    def _say_drafts(seconds: float, drafts: SpecDecodingStats) -> None:
        logger.info(
            "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, Drafted "
            "throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, Per-position acceptance rate: %s, "
            "Avg Draft acceptance rate: %.1f%%",
            drafts.mean_acceptance_length,
            drafts.num_accepted_tokens / seconds,
            drafts.num_draft_tokens / seconds,
            drafts.num_accepted_tokens,
            drafts.num_draft_tokens,
            ", ".join(f"{rate:.3f}" for rate in drafts.acceptance_rates_per_pos),
            100 * drafts.acceptance_rate,
        )
