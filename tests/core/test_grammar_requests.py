"""Test the scheduler's part in requests that wait for a grammar and are sampled under it, with
grammar doubles.
"""

from dataclasses import dataclass, field

import pytest
from core.driving import Drive, make_scheduler

from minivllm.config import DraftingConfig
from minivllm.core.request import Request, RequestStatus

WAITING = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


@dataclass
class Grammar:
    """A grammar that allows any `length` tokens except `forbidden`, and then only the
    end-of-sequence token 7.
    """

    length: int = 100
    forbidden: tuple[int, ...] = ()
    accepted: list[int] = field(default_factory=list)
    error: str | None = None

    def accept_token(self, token_id: int) -> bool:
        if token_id in self.forbidden or (len(self.accepted) >= self.length) != (token_id == 7):
            self.error = f"{token_id} does not fit"
            return False
        self.accepted.append(token_id)
        return True

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        return token_ids[: next((at for at, token in enumerate(token_ids) if token in self.forbidden), len(token_ids))]

    def is_terminated(self) -> bool:
        return self.accepted[-1:] == [7]


@dataclass
class Wanted:
    """A requested grammar that is ready once `pending` is false, unless it has failed."""

    grammar: Grammar = field(default_factory=Grammar)
    pending: bool = False
    failed: str | None = None

    def is_pending(self) -> bool:
        return self.pending

    def failure(self) -> str | None:
        return self.failed


def add(drive: Drive, name: str, wanted: Wanted, prompt: int = 4, **arguments) -> Request:
    request = drive.add(name, prompt, **arguments)
    request.structured_output_request, request.status = wanted, WAITING
    return request


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_waits_for_its_grammar_blocks_nobody_and_keeps_its_place(policy):
    d = Drive(make_scheduler(policy=policy, max_num_seqs=2))
    slow = Wanted(pending=True)
    add(d, "a", slow, arrival_time=1.0)
    d.add("b", 4, max_tokens=2, arrival_time=2.0)
    assert d.step() == {"b": 4}
    d.add("c", 4, arrival_time=3.0)
    d.add("d", 4, arrival_time=4.0)
    slow.pending = False
    assert d.step() == {"b": 1, "a": 4}, "first come, first served again"
    assert d.scheduler.requests["a"].status is RequestStatus.RUNNING


def test_only_the_steps_that_sample_by_a_grammar_say_so():
    d = Drive(make_scheduler(max_num_batched_tokens=4))
    d.add("plain", 2, max_tokens=2)
    assert not d.schedule().has_structured_output_requests
    d = Drive(make_scheduler(max_num_batched_tokens=4))
    add(d, "a", Wanted(), prompt=6)
    chunk = d.schedule()
    assert not chunk.has_structured_output_requests
    d.update()
    assert d.schedule().has_structured_output_requests


def test_a_grammar_that_fails_ends_its_request_alone():
    d = Drive(make_scheduler())
    add(d, "a", Wanted(failed="too hard"))
    d.add("b", 4)
    assert d.step() == {"b": 4}
    first, second = d.engine_outputs
    assert (first.request_id, first.finish_reason, first.error) == ("a", "error", "too hard")
    assert (second.request_id, second.finish_reason) == ("b", None)
    assert "a" not in d.scheduler.requests


def test_a_wait_outlasts_a_failed_step():
    d = Drive(make_scheduler())
    wanted = Wanted(pending=True)
    add(d, "a", wanted)
    d.fail_step()
    assert d.step() == {}
    wanted.pending = False
    assert d.step() == {"a": 4}


def test_the_grammar_moves_on_with_each_token_also_over_a_preemption():
    d = Drive(make_scheduler(num_gpu_blocks=6))
    wanted = Wanted()
    request = add(d, "b", wanted, prompt=7, max_tokens=9)
    d.add("a", 7, max_tokens=9)
    d.scheduler.waiting.remove_requests([request])
    d.scheduler.waiting.add_request(request)
    d.finish()
    assert request.num_preemptions > 0
    assert wanted.grammar.accepted == request.output_token_ids


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_end_of_the_grammar_is_the_requests_also_where_eos_is_ignored(ignore_eos):
    d = Drive(make_scheduler())
    d.worker.next_token = lambda token_ids: 7 if len(token_ids) == 6 else 5
    request = add(d, "a", Wanted(Grammar(length=2)), max_tokens=8, eos_token_ids=() if ignore_eos else (7,))
    d.finish()
    assert d.last["a"].finish_reason == "stop"
    assert request.output_token_ids == [5, 5, 7]


def test_a_token_that_does_not_fit_is_that_requests_error():
    d = Drive(make_scheduler())
    add(d, "a", Wanted(Grammar(length=0)), eos_token_ids=(7,))
    d.add("b", 4)
    d.step()
    assert [output.finish_reason for output in d.engine_outputs] == ["error", None]
    assert "does not fit" in d.engine_outputs[0].error


def test_drafts_that_do_not_fit_are_not_verified():
    d = Drive(make_scheduler(drafting=DraftingConfig(num_speculative_tokens=3)))
    request = add(d, "a", Wanted(Grammar(forbidden=(5,))))
    d.step({"a": [1, 5, 2]})
    assert request.spec_token_ids == [1]
