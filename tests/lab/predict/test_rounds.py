"""Rounds show a recorded state, and every wrong rule answers otherwise than vLLM."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from predict_rounds import made_again, rounds, to_json

from minivllm_lab.predict.levels import LEVELS, ROUNDS, load
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.rounds import Round
from minivllm_lab.predict.workload import recorded

RECORDED = Path(__file__).parents[2] / "conformance" / "data"
PICKED = load()


def test_there_are_sixty_rounds_and_none_twice() -> None:
    puzzle = [one for level in PICKED for one in level]
    assert len(puzzle) >= 60
    assert len({one.source for one in puzzle}) == len(puzzle)
    assert min(map(len, PICKED)) >= 8
    assert len(PICKED) == len(LEVELS)


def test_a_level_is_what_its_title_says() -> None:
    budget, chunks, memory, preemption, priority, hits, drafts = PICKED
    limited = [[bool(one.threshold) or not one.chunked for one in level] for level in (budget, chunks)]
    assert not any(limited[0])
    assert all(limited[1])
    waits = [any(row.name not in one.decision.tokens for row in one.waiting) for one in memory]
    assert all(waits)
    for level, preempts in ((budget, False), (chunks, False), (memory, False), (preemption, True), (priority, True)):
        assert {bool(one.decision.preempted) for one in level} == {preempts}
        assert {one.policy for one in level} == {"priority" if level is priority else "fcfs"}
        assert not any(row.hit for one in level for row in one.waiting)
    assert all(any(row.hit for row in one.waiting) for one in hits)
    assert all(any(row.drafts for row in one.running) for one in drafts)


def test_every_round_is_the_recorded_step() -> None:
    again = made_again()
    for level, made in zip(PICKED, again, strict=True):
        for puzzle, other in zip(level, made, strict=True):
            assert json.loads(json.dumps(to_json(other))) == to_json(puzzle), puzzle.source


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
    assert json.loads(ROUNDS.read_text())[0][0] == to_json(PICKED[0][0])
    assert Round.from_json(to_json(PICKED[3][0])) == PICKED[3][0]
