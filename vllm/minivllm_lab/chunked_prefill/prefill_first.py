"""Prefill first: the engine's scheduler as vLLM's was before chunked prefill (V0's default). For comparison only.

A step either admits or decodes. While somebody waits for whom there is room, a step computes whole prompts, as many as
fit into its budget, and running requests get no token. A prompt that is longer than the budget would wait for ever, so
`SchedulerConfig` wants a budget of `max_model_len` with `enable_chunked_prefill=False`.

In vLLM v0.6.0: `vllm/core/scheduler.py` (`Scheduler._schedule_default`, `_schedule_prefills`).
"""

from __future__ import annotations

from minivllm.config import NO_PARTS, CacheConfig, Parts, SchedulerConfig
from minivllm.config.checks import require
from minivllm.core.request_queue import RequestQueue
from minivllm.core.scheduler import Scheduler, Step


class PrefillFirst(Scheduler):
    """Whole prompts of those who wait, or a token for each who runs.

    Raises:
        MinivllmError: `enable_chunked_prefill` is on.
    """

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, parts: Parts = NO_PARTS) -> None:
        require(not scheduler_config.enable_chunked_prefill, "prefill first cuts no prompt: disable chunked prefill")
        super().__init__(scheduler_config, cache_config, parts)

    def _schedule_running(self, step: Step, chunk_limit: int) -> None:
        """Whoever waits goes first; if anybody could be admitted, the others get nothing in this step."""
        super()._schedule_waiting(step, step.token_budget)
        if not step.admitted:
            super()._schedule_running(step, chunk_limit)

    def _schedule_waiting(self, step: Step, chunk_limit: int, queue: RequestQueue | None = None) -> None:
        """Nothing is left to do: all that could be admitted has been."""
