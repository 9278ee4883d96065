"""A scheduler for the engine that leaves every decision to a function: the learner's `schedule` of exercise 04.

    LLM(model, parts=Parts(scheduler=scheduler_that_asks(schedule)), enable_prefix_caching=False)

The function decides on counts (tokens and blocks); this class carries out what it decided on the engine's requests and
block tables. First come, first served, without prefix caching and drafts.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError


@dataclass
class CountedRequest:
    """What a scheduling function sees of a request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


@dataclass
class CountedPool:
    """What a scheduling function sees of the KV cache."""

    num_free_blocks: int
    block_size: int


Schedule = Callable[[list, deque, CountedPool, int, int, int], dict[str, int]]
"""`schedule(running, waiting, pool, token_budget, chunk_limit, max_num_seqs)`, as exercise 04 describes it."""


def scheduler_that_asks(schedule: Schedule) -> type[Scheduler]:
    """The engine's scheduler with `schedule` deciding.

    A decision that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """

    class AskingScheduler(Scheduler):
        def _schedule_running(self, step, chunk_limit: int) -> None:
            """Asks for the whole step, admissions included, and carries it out."""
            pool = CountedPool(self.kv_cache_manager.block_pool.get_num_free_blocks(), self.cache_config.block_size)
            running, waiting = [self._counted(one) for one in self.running], deque(map(self._counted, self.waiting))
            decided = schedule(running, waiting, pool, step.token_budget, chunk_limit, self.config.max_num_seqs)
            kept = {one.request_id for one in running}
            for request in [one for one in reversed(self.running) if one.request_id not in kept]:
                self.running.remove(request)
                self._preempt_request(request, step)
            if self.requests and not decided and not step.preempted_req_ids:  # the next step would be the same
                raise MinivllmError(
                    f"your schedule gives nobody a token, and {len(self.requests)} requests are unfinished"
                )
            for request_id, num_tokens in decided.items():
                self._carry_out(request_id, num_tokens, step)

        def _schedule_waiting(self, step, chunk_limit: int) -> None:
            """Nothing is left to do: `schedule` has admitted already."""

        def _counted(self, request: Request) -> CountedRequest:
            held = len(self.kv_cache_manager.get_block_ids(request.request_id))
            return CountedRequest(request.request_id, request.num_tokens, request.num_computed_tokens, held)

        def _carry_out(self, request_id: str, num_tokens: int, step) -> None:
            gets = f"your schedule gives request {request_id!r} {num_tokens} tokens"
            request = self.requests.get(request_id)
            if request is None or not 0 < num_tokens <= step.token_budget:
                raise MinivllmError(f"{gets}, and {step.token_budget} are left of the budget")
            if request.status is not RequestStatus.RUNNING:
                if self.waiting.peek_request() is not request or not self._admit(request, step, num_tokens):
                    raise MinivllmError(f"{gets}, but it is not at the head of the queue, or its tokens do not fit")
                return
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_tokens)
            if new_blocks is None:
                raise MinivllmError(f"{gets}, and no block is free for them")
            step.num_scheduled_tokens[request_id] = num_tokens
            step.token_budget -= num_tokens
            step.continued.append(request)
            if new_blocks:
                step.new_block_ids[request_id] = [block.block_id for block in new_blocks]

    return AskingScheduler
