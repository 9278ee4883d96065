"""Helpers that make and drive a scheduler in tests."""

from typing import Any

from core.invariants import check_scheduler
from core.worker_double import WorkerDouble

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput

CACHE_FIELDS = {"num_gpu_blocks", "block_size", "enable_prefix_caching"}


def make_scheduler(**settings: Any) -> Scheduler:
    """Return a scheduler with 10 usable blocks of 4 tokens and requests of at most 40 tokens,
    unless overridden.
    """
    cache = {"num_gpu_blocks": 11, "block_size": 4} | {k: v for k, v in settings.items() if k in CACHE_FIELDS}
    rest = {"max_model_len": 40} | {k: v for k, v in settings.items() if k not in CACHE_FIELDS}
    return Scheduler(SchedulerConfig(**rest), CacheConfig(**cache))


class Drive:
    """A scheduler with a worker double that checks all invariants after every call. No token is
    sampled twice.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = WorkerDouble(scheduler.cache_config.block_size, self._next_token)
        self.num_sampled = 0
        self.engine_outputs: list[EngineCoreOutput] = []

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 5, **arguments: Any) -> Request:
        """Add a request; an integer prompt stands for that many tokens that no other request
        shares.
        """
        if isinstance(prompt, int):
            base = 1000 * (1 + len(self.scheduler.requests) + self.num_sampled)
            prompt = [base + position for position in range(prompt)]
        request = Request(request_id, prompt, max_tokens=max_tokens, **arguments)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Run only the first half of a step."""
        output = self.scheduler.schedule()
        check_scheduler(self.scheduler, under_way=True)
        return output

    def step(self, drafts: dict[str, list[int]] | None = None) -> dict[str, int]:
        """Run a whole step and return what was scheduled; `drafts` are for the next step."""
        output = self.schedule()
        self.engine_outputs = self.scheduler.update_from_output(output, self.worker.execute(output))
        self.scheduler.update_draft_token_ids(drafts or {})
        check_scheduler(self.scheduler)
        return dict(output.num_scheduled_tokens)

    def blocks(self, request_id: str) -> list[int]:
        """Return a request's block table."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)

    def running(self) -> list[str]:
        """Return the ids of the running requests, in order."""
        return [request.request_id for request in self.scheduler.running]

    def waiting(self) -> list[str]:
        """Return the ids of the waiting requests, in order."""
        return [request.request_id for request in self.scheduler.waiting]

    def free(self) -> list[int]:
        """Return the ids of the free blocks, starting with the next to be reused."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return [block.block_id for block in queue.first(queue.num_free_blocks)]

    def _next_token(self, token_ids: list[int]) -> int:
        self.num_sampled += 1
        return 10**6 + self.num_sampled
