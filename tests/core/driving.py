"""Helpers that make and drive a scheduler in tests."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from core.invariants import check_scheduler
from core.worker_double import WorkerDouble

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

CACHE_FIELDS = {"num_gpu_blocks", "block_size", "enable_prefix_caching"}


def make_scheduler(kind: type[Scheduler] = Scheduler, **settings: Any) -> Scheduler:
    """Return a scheduler with 10 usable blocks of 4 tokens and requests of at most 40 tokens,
    unless overridden.
    """
    cache = {"num_gpu_blocks": 11, "block_size": 4} | {k: v for k, v in settings.items() if k in CACHE_FIELDS}
    rest = {"max_model_len": 40} | {k: v for k, v in settings.items() if k not in CACHE_FIELDS}
    return kind(SchedulerConfig(**rest), CacheConfig(**cache))


class Drive:
    """A scheduler with a worker double and up to `depth` steps in flight, and all invariants
    checked after every call. Without a worker of its own, no token is sampled twice.

    `received` has the tokens of each request, and `last` the output that ended it.
    """

    def __init__(self, scheduler: Scheduler, worker: WorkerDouble | None = None, depth: int = 1) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.worker = worker or WorkerDouble(scheduler.cache_config.block_size, self._next_token)
        self.num_sampled = 0
        self.requests: dict[str, Request] = {}
        self.received: dict[str, list[int]] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.engine_outputs: list[EngineCoreOutput] = []

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 5, **arguments: Any) -> Request:
        """Add a request; an integer prompt stands for that many tokens that no other request
        shares.
        """
        if isinstance(prompt, int):
            base = 1000 * (1 + len(self.requests))
            prompt = [base + position for position in range(prompt)]
        request = Request(request_id, prompt, max_tokens=max_tokens, **arguments)
        self.scheduler.add_request(request)
        self.requests[request_id], self.received[request_id] = request, []
        return request

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        ended = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        check_scheduler(self.scheduler, under_way=bool(self.in_flight))
        return ended

    def schedule(self) -> SchedulerOutput:
        """Run the first half of a step: it is in flight then."""
        output = self.scheduler.schedule()
        check_scheduler(self.scheduler, under_way=self.depth == 1)
        self.in_flight.append((output, self.worker.execute(output)))
        return output

    def update(self) -> list[EngineCoreOutput]:
        """Run the second half of the oldest step in flight; return what it gives the front end."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        for output in outputs:
            name = output.request_id
            assert name not in self.last, "output of a request that has ended"
            assert self.requests[name].status is not RequestStatus.FINISHED_ABORTED
            self.received[name] += output.new_token_ids
            if output.finish_reason:
                self.last[name] = output
        check_scheduler(self.scheduler)
        return outputs

    def step(self, drafts: dict[str, list[int]] | None = None, aborts: Sequence[str] = ()) -> dict[str, int]:
        """Schedule a step, and end the oldest if there are enough in flight; return what was
        scheduled. The `drafts` are for the next step, and the `aborts` come between the halves.
        """
        output = self.schedule()
        self.abort(aborts)
        while len(self.in_flight) >= self.depth:
            self.engine_outputs = self.update()
        self.propose(drafts or {})
        return dict(output.num_scheduled_tokens)

    def propose(self, drafts: dict[str, list[int]]) -> None:
        self.scheduler.update_draft_token_ids(drafts)
        check_scheduler(self.scheduler)

    def fail_step(self, gone: Collection[str] = ()) -> None:
        """Drop the steps in flight and the requests `gone`, as after an error on a rank."""
        self.in_flight.clear()
        self.scheduler.start_over(gone)
        self.worker.reset()
        check_scheduler(self.scheduler)

    def finish(self) -> int:
        """Step until no request is left; return how many tokens were scheduled."""
        total = 0
        for _ in range(3000):
            if self.scheduler.has_unfinished_requests():
                total += sum(self.step().values())
            elif self.in_flight:
                self.update()
        assert not self.scheduler.has_unfinished_requests(), "somebody waits for ever"
        return total

    @property
    def num_free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def blocks(self, request_id: str) -> list[int]:
        """Return a request's block table."""
        return self.scheduler.kv_cache_manager.get_block_ids(request_id)

    def running(self) -> list[str]:
        """Return the ids of the running requests, in order."""
        return [request.request_id for request in self.scheduler.running]

    def waiting(self) -> list[str]:
        """Return the ids of the waiting requests, in order."""
        return [request.request_id for request in self.scheduler.waiting]

    def _next_token(self, token_ids: list[int]) -> int:
        self.num_sampled += 1
        return 10**6 + self.num_sampled
