"""Test the rules of a step that vLLM's traces do not show, or that are easy to get wrong, one at a
time.

`tests/conformance` has the others: budget and order of a step, admission, chunks, hits, preemption
and which block is reused next.
"""

import pytest
from core.driving import Drive, make_scheduler
from refusals import assert_refused

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.lora_request import LoRARequest
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput


def drive(**settings: object) -> Drive:
    return Drive(make_scheduler(**settings))


# A scheduler that runs ahead of the model


def test_a_request_that_can_get_nothing_is_passed_over() -> None:
    d = drive(max_num_batched_tokens=5)
    d.add("a", 4)
    d.add("b", 8)
    assert d.schedule().num_scheduled_tokens == {"a": 4, "b": 1}
    # Scheduled again before its token came back.
    assert d.schedule().num_scheduled_tokens == {"b": 5}


# Admission


def test_the_watermark_holds_for_admissions_while_something_runs() -> None:
    d = drive(watermark=0.5)
    d.add("a", 36, max_tokens=4)
    assert d.step() == {"a": 36}, "nothing runs: no watermark"
    d = drive(watermark=0.5)
    d.add("a", 4, max_tokens=20)
    d.add("b", 20)
    assert d.step() == {"a": 4}, "9 blocks are free, 5 are wanted, 5 must stay"
    d.add("c", 1)
    assert d.waiting() == ["b", "c"]
    d.step()
    assert len(d.blocks("a")) == 2, "a running request takes what it needs"


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room() -> None:
    d = drive(enable_chunked_prefill=False, max_num_batched_tokens=40, num_gpu_blocks=40)
    d.add("a", 30)
    d.add("b", 11)
    d.add("c", 2)
    assert d.step() == {"a": 30}, "b does not fit into what is left, and blocks c"
    assert d.step() == {"a": 1, "b": 11, "c": 2}
    d.add("d", 37)
    assert d.step() == {"a": 1, "b": 1, "c": 1, "d": 37}, "exactly what is left"


# The threshold for long prompts


@pytest.mark.parametrize(
    ("threshold", "names", "chunks"), [(4, "ab", [6, 6]), (4, "abcd", [4, 4, 4]), (0, "ab", [9, 3])]
)
def test_an_adaptive_threshold_is_at_least_a_fair_share_of_the_budget(
    threshold: int, names: str, chunks: list[int]
) -> None:
    """Two requests share twelve tokens; among four, the share of three is below the threshold; and
    without a threshold there is nothing to adapt.
    """
    d = drive(
        long_prefill_token_threshold=threshold, long_prefill_token_threshold_adaptive=True, max_num_batched_tokens=12
    )
    for name in names:
        d.add(name, 9)
    assert list(d.step().values()) == chunks


# The prefix cache


def test_skip_reading_prefix_cache_still_publishes() -> None:
    d = drive()
    d.add("a", [*range(8)], max_tokens=1, skip_reading_prefix_cache=True)
    d.step()
    d.add("b", [*range(8)], max_tokens=1, skip_reading_prefix_cache=True)
    assert d.step() == {"b": 8}
    d.add("c", [*range(8)], max_tokens=1)
    assert d.step() == {"c": 4}
    assert d.scheduler.make_stats().prefix_cache_stats.requests == 1, "only c has looked"


def test_stats_count_admissions_and_only_those() -> None:
    d = drive()
    d.add("a", [*range(8)], max_tokens=20)
    d.step()
    d.add("b", [*range(8), *range(100, 130)], max_tokens=1)
    d.step()
    stats = d.scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1), "b was looked up and did not fit"
    assert stats.prefix_cache_stats.requests == 1
    d.abort(["a"])
    d.step()
    counts = d.scheduler.make_stats().prefix_cache_stats
    assert (counts.requests, counts.queries, counts.hits) == (2, 8 + 38, 8)
    assert d.scheduler.make_stats().prefix_cache_stats == counts, "reading consumes nothing"
    assert stats.prefix_cache_stats.requests == 1, "a snapshot does not change"


# Preemption


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    d = drive(num_gpu_blocks=5, max_model_len=16)
    d.add("a", 8, max_tokens=2)
    b = d.add("b", 7, max_tokens=5)
    d.step()
    assert d.step() == {"a": 1}
    assert d.step() == {"b": 4}, "prompt and output are 8 tokens, 4 of them found"
    assert b.num_cached_tokens == 0, "told to the client: the hit of the first admission"
    counts = d.scheduler.make_stats().prefix_cache_stats
    assert (counts.queries, counts.hits, counts.preempted_hits) == (8 + 7, 0, 4)
    assert d.scheduler.make_stats().num_recomputed_tokens == 3, "7 were computed, and 4 of them are found"
    d.fail_step()
    d.step()
    assert d.scheduler.make_stats().num_recomputed_tokens == 3, "nobody was preempted again"


def num_steps_of_equals(rules: SchedulingPolicy, must_fit: bool) -> int:
    """Count the steps, at most 500, until two equal requests that fill the pool in chunks of 2
    tokens have ended.
    """
    config = SchedulerConfig(
        max_model_len=10, max_num_batched_tokens=4, max_num_seqs=2, long_prefill_token_threshold=2, policy="priority",
        scheduler_reserve_full_isl=must_fit,
    )  # fmt: skip
    d = Drive(Scheduler(config, CacheConfig(num_gpu_blocks=6, block_size=2, enable_prefix_caching=False), rules))
    for name in "ab":
        d.add(name, 7, max_tokens=2, arrival_time=1.0)
    for number in range(500):
        if not d.scheduler.has_unfinished_requests():
            return number
        d.step()
    return 500


def test_equal_requests_do_not_preempt_each_other_forever() -> None:
    """vLLM's rule picks the first of equals, so they do preempt each other unless all known tokens
    must fit, which is the default.
    """

    def first_of_equals(running, policy, blocks) -> Request:
        return max(running, key=lambda request: (request.priority, request.arrival_time))

    vllms = SchedulingPolicy(victim=first_of_equals)
    assert num_steps_of_equals(DEFAULT_POLICY, must_fit=False) < 20
    assert num_steps_of_equals(vllms, must_fit=False) == 500
    assert num_steps_of_equals(vllms, must_fit=True) < 20


def test_a_scheduled_victims_tokens_return_to_the_budget() -> None:
    d = drive(num_gpu_blocks=5, max_model_len=16, policy="priority", max_num_batched_tokens=8)
    d.add("worst", 6, max_tokens=9, priority=9)
    d.step()
    d.add("first", 4, max_tokens=9, priority=0)
    d.add("second", 3, max_tokens=9, priority=1)
    d.step()
    output = d.schedule()
    assert output.preempted_req_ids == {"worst"}
    assert output.num_scheduled_tokens == {"first": 1, "second": 1}
    assert output.total_num_scheduled_tokens == 2
    assert output.scheduled_cached_reqs.req_ids == ["first", "second"]


# Ends


def test_the_worker_hears_once_who_finished() -> None:
    d = drive()
    d.add("a", 3, max_tokens=1)
    d.add("b", 3, max_tokens=3)
    d.step()
    assert d.schedule().finished_req_ids == {"a"}
    assert d.schedule().finished_req_ids == set()


def test_abort_of_a_running_a_waiting_and_a_preempted_request() -> None:
    d = drive(num_gpu_blocks=5, max_model_len=16)
    d.add("running", 8, max_tokens=8)
    d.add("preempted", 7, max_tokens=8)
    d.step()
    d.add("waiting", 8)
    d.step()
    assert (d.running(), d.waiting()) == (["running"], ["preempted", "waiting"])
    ended = d.abort(["waiting", "unknown", "running", "preempted", "running"])
    assert ended == ["waiting", "running", "preempted"]
    assert not d.scheduler.has_unfinished_requests()
    assert d.num_free == 4
    assert d.step() == {}


def test_tokens_and_logprobs_after_a_stop_token_are_dropped() -> None:
    d = drive(drafting=DraftingConfig(num_speculative_tokens=2))
    d.add("a", 3, max_tokens=9, stop_token_ids=[6])
    d.step({"a": [5, 6]})
    output = d.schedule()
    sampled = ModelRunnerOutput({"a": [5, 6, 7]}, logprobs={"a": ["five", "six", "seven"]})
    [engine_output] = d.scheduler.update_from_output(output, sampled)
    assert (engine_output.new_token_ids, engine_output.new_logprobs) == ([5, 6], ["five", "six"])
    assert (engine_output.finish_reason, engine_output.stop_reason) == ("stop", 6)


# Adapters


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter-{number}", number, f"/adapters/{number}")


def test_a_request_over_the_adapter_limit_is_skipped_and_keeps_its_place() -> None:
    d = drive(max_loras=1, max_num_seqs=3)
    d.add("one", 2, max_tokens=2, lora_request=adapter(1))
    d.add("two", 2, lora_request=adapter(2))
    d.add("again", 2, max_tokens=2, lora_request=adapter(1))
    d.add("base", 2, max_tokens=2)
    d.add("base too", 2)
    assert d.step() == {"one": 2, "again": 2, "base": 2}
    assert d.waiting() == ["two", "base too"]
    d.step()
    assert d.step() == {"two": 2, "base too": 2}


# Drafts


def test_drafts_are_extra_tokens_and_rejected_ones_are_rolled_back() -> None:
    d = drive(drafting=DraftingConfig(num_speculative_tokens=3))
    request = d.add("a", 5, max_tokens=9)
    d.step({"a": [10**6 + 2, 10**6 + 3, 0]})
    output = d.schedule()
    assert output.num_scheduled_tokens == {"a": 4}
    assert output.scheduled_spec_decode_tokens == {"a": [10**6 + 2, 10**6 + 3, 0]}
    assert request.num_computed_tokens == 9
    [engine_output] = d.update()
    assert engine_output.new_token_ids == [10**6 + 2, 10**6 + 3, 10**6 + 4], "two drafts and one token of its own"
    assert request.num_computed_tokens == request.num_tokens - 1 == 8
    assert d.step() == {"a": 1}
    stats = d.scheduler.make_stats().spec_decoding_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_drafts_without_room_are_dropped() -> None:
    d = drive(drafting=DraftingConfig(num_speculative_tokens=3), max_num_batched_tokens=3)
    d.add("a", 1, max_tokens=9)
    d.add("b", 1, max_tokens=9)
    d.step({"a": [7], "b": [7, 8, 9]})
    output = d.schedule()
    assert output.num_scheduled_tokens == {"a": 2, "b": 1}
    assert output.scheduled_spec_decode_tokens == {"a": [7]}
    assert not d.scheduler.requests["b"].spec_token_ids


def test_a_scheduled_victims_drafts_leave_the_step() -> None:
    d = drive(num_gpu_blocks=5, max_model_len=12, policy="priority", drafting=DraftingConfig(num_speculative_tokens=1))
    d.add("worst", 5, max_tokens=6, priority=9)
    d.step()
    d.add("best", 8, max_tokens=3, priority=1)
    d.step({"worst": [0]})
    output = d.schedule()
    assert output.num_scheduled_tokens == {"best": 1}
    assert output.preempted_req_ids == {"worst"}
    assert output.scheduled_spec_decode_tokens == {}


def test_too_many_drafts_are_refused() -> None:
    d = drive(drafting=DraftingConfig(num_speculative_tokens=1))
    d.add("a", 5)
    d.step()
    assert_refused("num_speculative_tokens is 1", d.scheduler.update_draft_token_ids, {"a": [1, 2]})


# Refusals


def test_a_request_that_cannot_run_is_refused() -> None:
    d = drive()
    d.add("a", 3)
    assert_refused("a prompt may have 39", d.add, request_id="b", prompt=40)
    assert d.waiting() == ["a"]


@pytest.mark.parametrize(("prompt", "max_tokens", "fits"), [(9, 8, True), (9, 9, False), (16, 1, True), (1, 17, False)])
def test_a_request_larger_than_the_pool_is_refused_with_the_length_that_would_fit(
    prompt: int, max_tokens: int, fits: bool
) -> None:
    d = drive(num_gpu_blocks=5)
    if fits:
        d.add("a", prompt, max_tokens=max_tokens)
        for _ in range(max_tokens):
            d.step()
        assert not d.scheduler.has_unfinished_requests()
        return
    assert_refused(r"\b17\b", d.add, "a", prompt, max_tokens=max_tokens)


def test_drafts_count_in_what_a_request_may_need() -> None:
    d = drive(num_gpu_blocks=5, drafting=DraftingConfig(num_speculative_tokens=2, num_lookahead_tokens=1))
    d.add("a", 7, max_tokens=7)
    assert_refused(r"\b14\b", d.add, "b", 7, max_tokens=8)


def test_max_model_len_bounds_what_a_request_may_need() -> None:
    d = drive(num_gpu_blocks=5, max_model_len=17)
    d.add("a", 9, max_tokens=99)
