"""Rounds show a recorded state, and every wrong rule answers otherwise than vLLM."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from minivllm_lab.predict.endless import endless
from minivllm_lab.predict.levels import LEVELS, ROUNDS, level_of, load
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.rounds import Decision, Round, rounds
from minivllm_lab.predict.workload import recorded

CONFORMANCE = Path(__file__).parents[2] / "conformance"
RECORDED = CONFORMANCE / "data"
PICKED = load()


def test_there_are_sixty_rounds_and_none_twice() -> None:
    puzzle = [one for level in PICKED for one in level]
    assert len(puzzle) >= 60
    assert len({one.source for one in puzzle}) == len(puzzle)
    assert [level_of(one) for one in puzzle] == [index for index, level in enumerate(PICKED) for _ in level]
    assert min(map(len, PICKED)) >= 8


def test_every_round_is_the_recorded_step() -> None:
    picked = {puzzle.source: puzzle for level in PICKED for puzzle in level}
    for name, workload, trace in (*recorded(RECORDED), *recorded(CONFORMANCE / "drafts")):
        steps = {source for source in picked if source.startswith(f"{name},")}
        if not steps:
            continue
        made = islice(rounds(workload, name, keep=_among(steps), trace=trace), len(steps))
        again = {puzzle.source: puzzle for puzzle in made}
        for source in steps:
            assert json.loads(json.dumps(again[source].to_json())) == picked.pop(source).to_json(), source
    assert not picked


def _among(sources: set[str]) -> Callable[[Round], bool]:
    return lambda puzzle: puzzle.source in sources


def test_each_wrong_rule_is_met_in_some_round() -> None:
    assert {name for level in PICKED for puzzle in level for name in puzzle.mistakes} == set(MISTAKES)


def test_a_scheduler_that_decides_otherwise_than_the_trace_changes_the_round() -> None:
    _, workload, trace = next(iter(recorded(RECORDED)))
    trace[5]["scheduled"][0][1] += 1
    ours, changed = (next(rounds(workload, "w", keep=_among({"w, step 5"}), trace=each)) for each in (None, trace))
    assert changed.decision.tokens != ours.decision.tokens


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_endless_rounds_belong_to_their_level_and_differ(level: int) -> None:
    source = endless(level, seed=3)
    puzzle = [next(source) for _ in range(4)]
    assert {level_of(one) for one in puzzle} == {level}
    assert len({one.source for one in puzzle}) == 4
    assert puzzle[0] == next(endless(level, seed=3))
    assert puzzle[0].requests != next(endless(level, seed=4)).requests


def test_json_keeps_a_round() -> None:
    assert json.loads(ROUNDS.read_text())[0][0] == PICKED[0][0].to_json()
    assert Round.from_json(PICKED[3][0].to_json()) == PICKED[3][0]
    assert Decision({"A": 1}, frozenset("B")).renamed({"A": "X", "B": "Y"}) == Decision({"X": 1}, frozenset("Y"))
