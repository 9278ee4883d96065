"""Schedule steps while others are in flight: what is sent ahead or held back, and what a late
output may do.

The behaviours are those of vLLM's `tests/v1/core/test_async_scheduler.py`: stop by max_tokens,
abort, preempt, prefix caching between prompts that arrive together, and between the turns of a
conversation.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from conformance.workloads import random_workload
from core.driving import CACHE_FIELDS
from core.invariants import check_scheduler
from core.test_random_workloads import SEEDS, Run, configs_of, serve
from core.worker_double import WorkerDouble
from hypothesis import given, settings

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


@dataclass
class WorkerAhead(WorkerDouble):
    """A worker that knows what the scheduler does not know yet: how many drafts were rejected, and
    its own drafts.
    """

    drafts: dict[str, list[int]] = field(default_factory=dict)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        cached, unknown = output.scheduled_cached_reqs, output.scheduled_spec_decode_tokens
        starts = [
            min(told, len(self.requests[request_id].token_ids) - 1)
            for request_id, told in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        own = {request_id: self.drafts.get(request_id, [])[: len(theirs)] for request_id, theirs in unknown.items()}
        invalid = {request_id: len(theirs) - len(own[request_id]) for request_id, theirs in unknown.items()}
        counts = {name: count - invalid.get(name, 0) for name, count in output.num_scheduled_tokens.items()}
        known = replace(
            output,
            scheduled_cached_reqs=replace(cached, num_computed_tokens=starts),
            num_scheduled_tokens=counts,
            scheduled_spec_decode_tokens={name: theirs for name, theirs in own.items() if theirs},
        )
        return replace(super().execute(known), num_invalid_spec_tokens=invalid)


class Ahead:
    """A scheduler, a worker, and the outputs that the scheduler has not seen yet. A request's token
    at position i is 100 + i.
    """

    def __init__(self, **options) -> None:
        cache = {"num_gpu_blocks": 11, "block_size": 4} | {k: v for k, v in options.items() if k in CACHE_FIELDS}
        rest = {"max_model_len": 40, "async_scheduling": True}
        rest |= {k: v for k, v in options.items() if k not in CACHE_FIELDS}
        self.scheduler = AsyncScheduler(SchedulerConfig(**rest), CacheConfig(**cache))
        self.worker = WorkerAhead(self.scheduler.cache_config.block_size, lambda tokens: 100 + len(tokens))
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.received: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **options) -> Request:
        request = Request(request_id, prompt, max_tokens=max_tokens, **options)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> dict[str, int]:
        output = self.scheduler.schedule()
        self.in_flight.append((output, self.worker.execute(output)))
        check_scheduler(self.scheduler)
        return output.num_scheduled_tokens

    def collect(self) -> list[EngineCoreOutput]:
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        check_scheduler(self.scheduler)
        for output in outputs:
            self.received.setdefault(output.request_id, []).extend(output.new_token_ids)
        return outputs

    def run(self) -> int:
        """Keep two steps in flight until all requests have ended; return the number of scheduled
        tokens.
        """
        total = 0
        while self.scheduler.has_unfinished_requests():
            total += sum(self.schedule().values())
            while len(self.in_flight) >= 2:
                self.collect()
        while self.in_flight:
            assert self.collect() == []
        return total


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_step_is_sent_beyond_max_tokens(max_tokens):
    ahead = Ahead()
    ahead.add("a", [1] * 5, max_tokens)
    ahead.add("b", [2] * 9, max_tokens + 1)
    assert ahead.run() == 5 + max_tokens - 1 + 9 + max_tokens
    assert {name: len(tokens) for name, tokens in ahead.received.items()} == {"a": max_tokens, "b": max_tokens + 1}


def test_no_step_is_sent_beyond_max_model_len():
    ahead = Ahead(max_model_len=8)
    ahead.add("a", [1] * 5, 30)
    assert ahead.run() == 7
    assert ahead.received == {"a": [105, 106, 107]}


def test_a_stop_token_is_noticed_one_step_late_and_what_came_after_it_is_dropped():
    ahead = Ahead()
    ahead.add("a", [1] * 5, 9, stop_token_ids=[106])
    assert ahead.run() == 5 + 1 + 1, "the third step was on its way when the second's token ended the request"
    assert ahead.received == {"a": [105, 106]}


def test_the_late_output_of_an_aborted_request_is_dropped():
    ahead = Ahead()
    ahead.add("a", [1] * 5, 9)
    ahead.add("b", [2] * 5, 4)
    ahead.schedule()
    ahead.schedule()
    ahead.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    ahead.run()
    assert ahead.received == {"b": [105, 106, 107, 108]}


def test_a_preempted_request_gets_its_late_token_once_and_waits_for_it():
    ahead = Ahead(num_gpu_blocks=6, enable_prefix_caching=False)
    ahead.add("a", [1] * 8, 9)
    victim = ahead.add("b", [2] * 8, 9)
    ahead.schedule()
    assert ahead.schedule() == {"a": 1}, "b has gone, for its block"
    assert (victim.status, victim.num_output_placeholders) == (RequestStatus.PREEMPTED, 1)
    ahead.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert ahead.schedule() == {}, "there is room, but its token is still to come"
    ahead.collect()
    assert victim.all_token_ids[-1] == 108
    assert ahead.schedule() == {"b": 9}
    ahead.run()
    assert ahead.received["b"] == [*range(108, 117)]


def test_drafts_of_a_preempted_request_that_are_rejected_late_are_not_taken_back_again():
    ahead = Ahead(num_gpu_blocks=5, enable_prefix_caching=False, drafting=DraftingConfig(num_speculative_tokens=1))
    ahead.add("a", [1] * 6, 5)
    victim = ahead.add("b", [2] * 4, 5)
    assert [ahead.schedule() for _ in range(3)] == [{"a": 6, "b": 4}, {"a": 2, "b": 2}, {"a": 2}]
    for _ in range(2):
        ahead.collect()
    assert (victim.status, victim.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)


def test_a_late_token_may_end_a_preempted_request():
    ahead = Ahead(num_gpu_blocks=6, enable_prefix_caching=False)
    ahead.add("a", [1] * 8, 9)
    ahead.add("b", [2] * 8, 9, stop_token_ids=[108])
    ahead.schedule()
    ahead.schedule()
    assert [output.finish_reason for output in ahead.collect()] == [None, "stop"]
    assert not ahead.scheduler.waiting


def test_prompts_that_arrive_together_share_their_blocks():
    ahead = Ahead()
    first, second = (ahead.add(name, [1] * 10, 4) for name in "ab")
    assert ahead.schedule() == {"a": 10, "b": 2}
    ahead.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_a_conversation_finds_its_last_turn():
    ahead = Ahead()
    ahead.add("a", [1] * 6, 7)
    ahead.run()
    second = ahead.add("b", [1] * 6 + ahead.received["a"] + [7], 3)
    ahead.run()
    assert second.num_cached_tokens == 12, "the last of its blocks was filled, and known to be, only as it ended"


def test_where_steps_go_through_stages_a_request_waits_for_its_token():
    ahead = Ahead(async_scheduling=False)
    ahead.add("a", [1] * 5, 9)
    assert [ahead.schedule() for _ in range(2)] == [{"a": 5}, {}]
    ahead.add("b", [2] * 5, 9)
    assert ahead.schedule() == {"b": 5}
    ahead.collect()
    assert ahead.schedule() == {"a": 1}


class RunAhead(Run):
    """A run that keeps up to `depth` steps in flight."""

    depth = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.worker = WorkerAhead(self.worker.block_size, self.worker.next_token)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def step(self, aborts_under_way: list[str]) -> None:
        unfinished = self.scheduler.has_unfinished_requests()
        output = self.scheduler.schedule()
        check_scheduler(self.scheduler)
        self.check_output(output, unfinished and (not self.in_flight or bool(output.num_scheduled_tokens)))
        sampled = self.worker.execute(output)
        self.worker.drafts = self.drafts(list(sampled.sampled_token_ids))
        self.in_flight.append((output, sampled))
        self.abort(aborts_under_way)
        while self.in_flight and (len(self.in_flight) >= self.depth or not output.num_scheduled_tokens):
            for engine_output in self.scheduler.update_from_output(*self.in_flight.popleft()):
                self.receive(engine_output)
            check_scheduler(self.scheduler)

    def drafts(self, request_ids: list[str]) -> dict[str, list[int]]:
        """Draft a random number of tokens for each request from what the worker knows."""
        known, drafts = self.worker.requests, {}
        for request_id in request_ids:
            tokens = list(known[request_id].token_ids)
            for _ in range(self.rng.randint(0, self.scheduler.drafting.num_speculative_tokens)):
                tokens.append(self.worker.next_token(tokens) if self.rng.random() < 0.7 else self.rng.randrange(4))
            drafts[request_id] = tokens[len(known[request_id].token_ids) :]
        return drafts


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_any_workload_ends_with_the_right_tokens(seed):
    """Two steps are in flight, with or without drafts, or three through pipeline stages, in pools
    that are too small.
    """
    rng = Random(seed)
    workload = random_workload(rng)
    through_stages = rng.random() < 0.3
    num_drafts = 0 if through_stages else rng.choice([0, 0, 1, 3])
    configs = configs_of(
        workload,
        2 * num_drafts,
        max_num_batched_tokens=workload["config"]["max_model_len"],
        max_loras=rng.choice([0, 1, 2]),
        drafting=DraftingConfig(num_speculative_tokens=num_drafts),
        async_scheduling=not through_stages,
    )
    run = RunAhead(AsyncScheduler(*configs), rng)
    run.depth = 3 if through_stages else 2
    serve(run, workload)
