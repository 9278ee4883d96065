"""Log throughput, running and waiting requests, cache usage and draft acceptance every few seconds
of work.

In vLLM v0.33.0: `vllm/v1/metrics/loggers.py` (`LoggingStatLogger`),
`vllm/v1/spec_decode/metrics.py` (`SpecDecodingLogging`).
"""

import time

from minivllm.core.stats import SchedulerStats, SpecDecodingStats
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS = 5.0


class ThroughputLog:
    """Counts tokens between two log lines. Idle time is excluded, so it does not look like low
    throughput.
    """

    def __init__(self) -> None:
        self._drafts = SpecDecodingStats()
        self.begin()

    def begin(self) -> None:
        """Start counting from now; the engine was idle before."""
        self._since = time.monotonic()
        self._prompt_tokens = self._generation_tokens = 0

    def observe(self, prompt_tokens: int, generation_tokens: int, stats: SchedulerStats) -> None:
        """Count a step's computed prompt tokens and generated tokens; write a log line when one is
        due.
        """
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        seconds = time.monotonic() - self._since
        if seconds >= SECONDS:
            self._say(seconds, stats)
            self.begin()

    def _say(self, seconds: float, stats: SchedulerStats) -> None:
        prefix = stats.prefix_cache_stats
        hit_rate = prefix.hits / max(1, prefix.queries)
        logger.info(
            f"Prompt {self._prompt_tokens / seconds:.1f} tokens/s, "
            f"generation {self._generation_tokens / seconds:.1f} tokens/s; "
            f"{stats.num_running_reqs} running, {stats.num_waiting_reqs} waiting; "
            f"KV cache usage {stats.kv_cache_usage:.1%}, prefix cache hit rate {hit_rate:.1%}"
        )
        # Counts are since the start, the line is about the last seconds.
        drafts = stats.spec_decoding_stats.since(self._drafts)
        self._drafts = stats.spec_decoding_stats
        if not drafts.num_drafts:
            return
        # The share of drafts that were accepted up to each position.
        rates = ", ".join(f"{count / drafts.num_drafts:.3f}" for count in drafts.num_accepted_tokens_per_pos)
        rate = drafts.num_accepted_tokens / drafts.num_draft_tokens
        logger.info(
            f"SpecDecoding metrics: Mean acceptance length: {1 + drafts.num_accepted_tokens / drafts.num_drafts:.2f}, "
            f"Accepted throughput: {drafts.num_accepted_tokens / seconds:.2f} tokens/s, "
            f"Drafted throughput: {drafts.num_draft_tokens / seconds:.2f} tokens/s, "
            f"Accepted: {drafts.num_accepted_tokens} tokens, Drafted: {drafts.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {rate:.1%}"
        )
