"""The replay: every request is served whole, shares add up, and the last one admitted gives way."""

import pytest
from lessons.harness import script_path
from refusals import assert_refused

from minivllm_lab.exercise import load
from minivllm_lab.paged_attention.memory_replay import replay
from minivllm_simulate.workloads import RequestLengths

lesson = load(script_path("02"))


def test_one_request_after_the_other():
    """There is room for one request of 3 + 1 tokens: admitted with 3, it grows once and leaves; the
    next comes a step later.
    """
    result = replay(lesson.paged(4, 1), [RequestLengths(3, 1)] * 100, 120)
    assert result.running == 1
    assert result.evicted == 0
    assert result.served_per_1000_steps == pytest.approx(500, rel=0.03)
    assert result.tokens == pytest.approx(3.5 / 4, rel=0.01)
    assert result.tokens + result.later + result.never + result.outside == pytest.approx(1)


def test_the_last_one_admitted_gives_way_and_keeps_its_tokens():
    """The second request waits for the first, with its prompt and what it has generated."""
    memory, admitted = lesson.paged(8, 1), []
    admit = memory.admit
    memory.admit = lambda request: admit(request) and not admitted.append((request.lengths, request.tokens))
    assert replay(memory, [RequestLengths(3, 5), RequestLengths(3, 4)] * 60, 80).evicted > 0
    assert (RequestLengths(3, 4), 4) in admitted, "admitted again"


def test_what_cannot_be_replayed_is_refused():
    assert_refused("does not fit alone", replay, lesson.paged(4, 1), [RequestLengths(9, 1)], 10)
    assert_refused("pass more requests", replay, lesson.paged(100, 1), [RequestLengths(1, 1)] * 3, 10)
