"""The replay: every request is served whole, shares add up, and who must give way does."""

from dataclasses import dataclass, field

import pytest

from minivllm.errors import MinivllmError
from minivllm_lab.paged_attention.memory_replay import Occupancy, Running, replay
from minivllm_simulate.workloads import RequestLengths


@dataclass
class Tokens:
    """A memory that holds tokens one by one and keeps a record of what was asked of it."""

    slots: int
    used: int = 0
    log: list = field(default_factory=list)

    def admit(self, one: Running) -> bool:
        one.home = one.home or "here"
        return self._take(one, one.tokens, "admit")

    def grow(self, one: Running) -> bool:
        return self._take(one, 1, "grow")

    def release(self, one: Running) -> None:
        self.used -= one.tokens
        self.log.append(("release", one.lengths, one.tokens))

    def held(self, one: Running) -> int:
        return one.tokens

    def _take(self, one: Running, count: int, what: str) -> bool:
        if self.used + count > self.slots:
            return False
        self.used += count
        self.log.append((what, one.lengths, one.tokens))
        return True


def test_one_request_after_the_other():
    """Room for one request of 3 + 1 tokens: admitted with 3, it grows once and leaves; the next comes a step later."""
    found = replay(Tokens(4), [RequestLengths(3, 1)] * 100, 120)
    assert found.running == 1
    assert found.evicted == 0
    assert found.served_per_1000_steps == pytest.approx(500, rel=0.03)
    assert found.tokens == pytest.approx(3.5 / 4, rel=0.01)
    assert found.tokens + found.later + found.never + found.outside == pytest.approx(1)


def test_what_is_empty_is_told_of_all_slots_and_of_those_held():
    found = Occupancy(
        tokens=0.6, later=0.1, never=0.1, outside=0.2, running=3.0, served_per_1000_steps=9.0, evicted=0
    ).figures()
    assert found["empty"] == pytest.approx(0.4)
    assert found["empty_of_held"] == pytest.approx(0.2 / 0.8)
    assert (found["tokens"], found["running"], found["served_per_1000_steps"]) == (0.6, 3.0, 9.0)


def test_the_last_one_admitted_gives_way_and_loses_no_token():
    first, second = RequestLengths(3, 5), RequestLengths(3, 4)
    memory = Tokens(8)
    found = replay(memory, [first, second] * 60, 80)
    assert found.evicted > 0
    gone = [entry for entry in memory.log if entry[0] == "release" and entry[2] < entry[1].total]
    assert gone, "somebody gave way"
    for _, lengths, tokens in gone:
        assert ("admit", lengths, tokens) in memory.log, "it came back with the tokens it had"


def test_what_cannot_be_replayed_is_said():
    with pytest.raises(MinivllmError, match="does not fit alone"):
        replay(Tokens(4), [RequestLengths(9, 1)], 10)
    with pytest.raises(MinivllmError, match="give more requests"):
        replay(Tokens(100), [RequestLengths(1, 1)] * 3, 10)
