"""The replay: every request is served whole, shares add up, and the request that must give way
does.
"""

import pytest

from minivllm.errors import MinivllmError
from minivllm_lab.paged_attention.memory_replay import Memory, Running, replay
from minivllm_simulate.workloads import RequestLengths


class Tokens(Memory):
    """A memory that holds tokens one at a time and logs its calls."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.used, self.log = 0, []

    def admit(self, request: Running) -> bool:
        request.home = request.home or "here"
        return self._take(request, request.tokens, "admit")

    def grow(self, request: Running) -> bool:
        return self._take(request, 1, "grow")

    def release(self, request: Running) -> None:
        self.used -= request.tokens
        self.log.append(("release", request.lengths, request.tokens))

    def held(self, request: Running) -> int:
        return request.tokens

    def _take(self, request: Running, count: int, label: str) -> bool:
        if self.used + count > self.slots:
            return False
        self.used += count
        self.log.append((label, request.lengths, request.tokens))
        return True


def test_one_request_after_the_other():
    """There is room for one request of 3 + 1 tokens: admitted with 3, it grows once and leaves; the
    next comes a step later.
    """
    result = replay(Tokens(4), [RequestLengths(3, 1)] * 100, 120)
    assert result.running == 1
    assert result.evicted == 0
    assert result.served_per_1000_steps == pytest.approx(500, rel=0.03)
    assert result.tokens == pytest.approx(3.5 / 4, rel=0.01)
    assert result.tokens + result.later + result.never + result.outside == pytest.approx(1)


def test_the_last_one_admitted_gives_way_and_loses_no_token():
    first, second = RequestLengths(3, 5), RequestLengths(3, 4)
    memory = Tokens(8)
    result = replay(memory, [first, second] * 60, 80)
    assert result.evicted > 0
    gone = [entry for entry in memory.log if entry[0] == "release" and entry[2] < entry[1].total]
    assert gone, "somebody gave way"
    for _, lengths, tokens in gone:
        assert ("admit", lengths, tokens) in memory.log, "it came back with the tokens it had"


def test_what_cannot_be_replayed_is_said():
    with pytest.raises(MinivllmError, match="does not fit alone"):
        replay(Tokens(4), [RequestLengths(9, 1)], 10)
    with pytest.raises(MinivllmError, match="pass more requests"):
        replay(Tokens(100), [RequestLengths(1, 1)] * 3, 10)
