"""Prefill first: the policy of vLLM before chunked prefill (V0's default). For comparison only.

    Scheduler(scheduler_config, cache_config, PREFILL_FIRST)

A step either admits or decodes. While somebody waits for whom there is room, a step computes whole prompts, as many as
fit into its budget, and running requests get no token. A prompt that is longer than the budget would wait for ever, so
`SchedulerConfig` wants a budget of `max_model_len` with `enable_chunked_prefill=False`.

In vLLM v0.6.0: `vllm/core/scheduler.py` (`Scheduler._schedule_default`, `_schedule_prefills`).
"""

from __future__ import annotations

from minivllm.config.checks import require
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step


def prefill_first(scheduler: Scheduler, step: Step) -> None:
    """Schedule whole prompts of those who wait, or a token for each who runs.

    Raises:
        MinivllmError: `enable_chunked_prefill` is on.
    """
    require(not scheduler.config.enable_chunked_prefill, "prefill first cuts no prompt: disable chunked prefill")
    step.chunk_limit = step.token_budget
    scheduler.schedule_waiting(step)
    if not step.admitted:
        scheduler.schedule_running(step)


PREFILL_FIRST = SchedulingPolicy(schedule=prefill_first)
