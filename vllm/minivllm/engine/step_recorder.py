"""Describe the scheduler after each step as one line of JSON, for recordings and for the page that
shows it.

A line is a snapshot that needs no other line:

    {"step": 7, "t": 0.41, "running": [{"number": 3, "blocks": [40, 41], …}], "batch": [[3, 64, 0,
    1, 16]], …}

`batch` has a row for each request of the step: its number, tokens computed, drafts among them,
tokens sampled, and how many tokens of an admitted request were cached (-1: it ran already).
Requests are numbered in the order in which they are first seen. With async scheduling the next step
is scheduled already, so its blocks and tokens are in the state. There are ids, counts and block
numbers in a line, no token and no text.

In vLLM v0.33.0 nothing writes steps.
"""

import json
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput

FORMAT = 2
WAITING_SHOWN = 24
"""Only this many waiting requests are described, from the head of the queue; all are counted."""


class StepRecorder:
    """Watches a scheduler and changes nothing in it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since = time.monotonic()
        self._step = 0
        self._numbers: dict[str, int] = {}
        self._last_number = 0

    def snapshot(
        self,
        step: SchedulerOutput | None = None,
        outputs: Sequence[EngineCoreOutput] = (),
        slots: Sequence[tuple[str, bool]] = (),
    ) -> str:
        """Describe the state after a step that produced these outputs; without outputs, the current
        state. `slots`: as from `LoRARegistry.slots`.
        """
        scheduler = self._scheduler
        config = self._scheduler.config
        cache = scheduler.cache_config
        remote = scheduler.remote
        # A snapshot without a step shows the state between two steps.
        self._step += step is not None
        # They go before the waiting ones, so they are shown before them.
        loading = [*remote.received, *remote.kv_holding_waiting.values()] if remote else []
        tier = remote.connector.tier_state() if remote else None
        # A pool that takes the place of the engine's own may know nothing of hashes.
        blocks = getattr(scheduler.kv_cache_manager.block_pool, "blocks", ())
        line = {
            "step": self._step,
            "t": round(time.monotonic() - self._since, 4),
            "num_blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "running": [self._described(request) for request in scheduler.running],
            "waiting": [self._described(request) for request in (*loading, *islice(scheduler.waiting, WAITING_SHOWN))],
            "num_waiting": len(scheduler.requests) - len(scheduler.running),
            "batch": [] if step is None else self._batch(step, outputs),
            "preempted": [] if step is None else sorted(map(self._number_of, step.preempted_req_ids)),
            "cached": [block.block_id for block in blocks if getattr(block, "block_hash", None) is not None],
            "tier": [] if tier is None else list(tier.values()),
            "slots": slots,
        }
        # Forget ended requests, or this would grow for as long as the server runs.
        self._numbers = {name: number for name, number in self._numbers.items() if name in scheduler.requests}
        return json.dumps(line, separators=(",", ":"))

    def _batch(self, step: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> list[list[int]]:
        drafts = step.scheduled_spec_decode_tokens
        sampled = {output.request_id: len(output.new_token_ids) for output in outputs}
        cached = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        return [
            [self._number_of(name), count, len(drafts.get(name, ())), sampled.get(name, 0), cached.get(name, -1)]
            for name, count in step.num_scheduled_tokens.items()
        ]

    def _described(self, request: Request) -> dict[str, Any]:
        return {
            "number": self._number_of(request.request_id),
            "id": request.request_id,
            "prompt": request.num_prompt_tokens,
            "max": request.max_tokens,
            "tokens": request.num_tokens,
            "computed": request.num_computed_tokens,
            "preemptions": request.num_preemptions,
            "blocks": self._scheduler.kv_cache_manager.get_block_ids(request.request_id),
            "adapter": request.lora_request.lora_name if request.lora_request else "",
        }

    def _number_of(self, request_id: str) -> int:
        if request_id not in self._numbers:
            self._last_number += 1
            self._numbers[request_id] = self._last_number
        return self._numbers[request_id]
