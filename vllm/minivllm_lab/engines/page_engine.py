"""The engine of the site's page *A model in the page*: the real scheduler, block pool and prefix
cache around a forward pass that the page computes.

It needs Python alone. A batch goes to the page as lists of numbers, in the flat form that the
engine's kernels take, and the page returns one token for each request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.step_recorder import FORMAT, StepRecorder

BLOCK_SIZE = 16


class PageEngine:
    """An engine for greedy requests.

    Args:
        forward: computes a batch, given as JSON (see `batch`), and returns the next token after the
            last one of each request, as JSON.
    """

    def __init__(self, forward: Callable[[str], str], num_blocks: int = 41, budget: int = 32, seqs: int = 4) -> None:
        self._forward = forward
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=(num_blocks - 1) * BLOCK_SIZE, max_num_seqs=seqs, max_num_batched_tokens=budget
            ),
            CacheConfig(num_gpu_blocks=num_blocks, block_size=BLOCK_SIZE),
        )
        self._recorder = StepRecorder(self._scheduler)
        self._added = 0

    def header(self) -> str:
        """Return the first line of a recording of this engine."""
        return json.dumps({"xray": FORMAT, "model": "tiny-python"})

    def add(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Add a request, and return its name.

        Raises:
            MinivllmError: the prompt is empty, or it does not fit with its answer.
        """
        name = f"request-{self._added + 1}"
        self._scheduler.add_request(Request(name, list(prompt), max_tokens=max_tokens, eos_token_ids=[0]))
        self._added += 1
        return name

    def abort(self) -> None:
        """End all requests."""
        self._scheduler.finish_requests(list(self._scheduler.requests), RequestStatus.FINISHED_ABORTED)

    def step(self) -> str | None:
        """Run a step, and return its tokens by request and its snapshot as JSON; None if there is
        nothing to do.
        """
        if not self._scheduler.has_unfinished_requests():
            return None
        output = self._scheduler.schedule()
        tokens = json.loads(self._forward(json.dumps(self.batch(output))))
        sampled = {
            name: [token]
            for name, token in zip(output.num_scheduled_tokens, tokens, strict=True)
            if not self._scheduler.requests[name].is_prefill_chunk
        }
        outputs = self._scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        told = {each.request_id: each.new_token_ids for each in outputs}
        finished = [each.request_id for each in outputs if each.finish_reason]
        line = json.loads(self._recorder.snapshot(output, outputs))
        return json.dumps({"tokens": told, "finished": finished, "line": line})

    def batch(self, output: SchedulerOutput) -> dict[str, Any]:
        """Return a step's batch: token ids and positions, flat; each request's tokens and blocks."""
        tokens, positions = [], []
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            start = request.num_computed_tokens - count
            tokens += request.all_token_ids[start : start + count]
            positions += range(start, start + count)
        return {
            "tokens": tokens,
            "positions": positions,
            "counts": [*output.num_scheduled_tokens.values()],
            "blocks": [self._scheduler.kv_cache_manager.get_block_ids(name) for name in output.num_scheduled_tokens],
            "block_size": BLOCK_SIZE,
        }
