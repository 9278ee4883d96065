"""Rounds show a recorded state, and every wrong rule answers otherwise than vLLM."""

import json
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from pathlib import Path

from minivllm_lab.predict.levels import ROUNDS, level_of, load
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
        made = islice(rounds(workload, name, trace, _among(steps)), len(steps))
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
    other = deepcopy(trace)
    other[5]["scheduled"][0][1] += 1
    ours, changed = (next(rounds(workload, "w", each, _among({"w, step 5"}))) for each in (trace, other))
    assert changed.decision.tokens != ours.decision.tokens


def test_json_keeps_a_round() -> None:
    assert json.loads(ROUNDS.read_text())[0][0] == PICKED[0][0].to_json()
    assert Round.from_json(PICKED[3][0].to_json()) == PICKED[3][0]
    assert Decision({"A": 1}, frozenset("B")).renamed({"A": "X", "B": "Y"}) == Decision({"X": 1}, frozenset("Y"))
