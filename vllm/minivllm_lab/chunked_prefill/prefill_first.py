"""Prefill first: the policy of vLLM before chunked prefill (V0's default). For comparison only.

    Scheduler(scheduler_config, cache_config, PREFILL_FIRST)

A step either admits or decodes. While there is room for a waiting request, a step computes whole
prompts, as many as fit into its budget, and running requests get no token. A prompt that is longer
than the budget would wait for ever, so with `enable_chunked_prefill=False`, `SchedulerConfig`
demands a budget of `max_model_len`.

In vLLM v0.6.0: `vllm/core/scheduler.py` (`Scheduler._schedule_default`, `_schedule_prefills`).
"""

from __future__ import annotations

from minivllm.config.checks import require
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step


def prompts_alone(scheduler: Scheduler, step: Step) -> None:
    """Fill a step with new prompts alone, if any can be admitted, as vLLM's V0 did."""
    scheduler.schedule_waiting(step)
    if not step.admitted:
        scheduler.schedule_running(step)


def prefill_first(scheduler: Scheduler, step: Step) -> None:
    """Schedule whole prompts of waiting requests, or else a token for each running one.

    Raises:
        MinivllmError: `enable_chunked_prefill` is on.
    """
    require(not scheduler.config.enable_chunked_prefill, "prefill first does not cut prompts: disable chunked prefill")
    step.chunk_limit = step.token_budget
    prompts_alone(scheduler, step)


PREFILL_FIRST = SchedulingPolicy(schedule=prefill_first)
