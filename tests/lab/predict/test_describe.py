"""A round's reasons: for each request the rule that decides, and a sentence with its number."""

from dataclasses import replace

from lab.predict.by_hand import STEP, Learner

from minivllm_lab.predict.describe import reasons
from minivllm_lab.predict.levels import load
from minivllm_lab.predict.rounds import Decision, Round, Row

ROUNDS = [puzzle for level in load() for puzzle in level]


def explain(puzzle: Round) -> list[str]:
    return [reason.says for reason in reasons(puzzle) if reason.says]


def test_every_round_can_be_solved_by_hand() -> None:
    for puzzle in ROUNDS:
        assert Learner(puzzle).decide() == puzzle.decision, puzzle.source


def test_the_explanation_has_each_request_that_gets_tokens_with_its_number() -> None:
    for puzzle in ROUNDS:
        lines = explain(puzzle)
        for name, count in puzzle.decision.tokens.items():
            assert any(line.startswith(name) and f"gets {count}," in line for line in lines), (puzzle.source, lines)
        for name in puzzle.decision.preempted:
            assert any(line.startswith(f"{name} is preempted") for line in lines)


def test_by_hand_each_number_has_its_reason() -> None:
    assert explain(STEP) == [
        "A runs: it lacks 10 and gets 8, the chunk limit.",
        "B runs: it lacks 1 and gets 1, all it lacks.",
        "C is admitted: it lacks 9 and gets 3, the rest of the budget.",
    ]


def test_by_hand_each_request_has_the_rule_that_decides() -> None:
    waiting = (*STEP.waiting, Row("D", known=2, computed=0, blocks=0, priority=0))
    full = replace(STEP, seats=2, waiting=waiting, decision=Decision({"A": 8, "B": 1}))
    tight = replace(full, decision=Decision({"A": 8}, frozenset("B")))
    hit = replace(STEP.waiting[0], hit=8)
    known = replace(STEP, waiting=(hit,), decision=Decision({"A": 8, "B": 1, "C": 1}))
    crowded = replace(STEP, free=2, decision=full.decision)
    alone = replace(STEP, running=STEP.running[:1], waiting=(), decision=Decision({"A": 10}))
    assert [reason.rule for reason in reasons(STEP)] == ["chunk limit", "all it lacks", "budget"]
    assert [reason.rule for reason in reasons(full)][2:] == ["seats", "queue"]
    assert [reasons(puzzle)[2].rule for puzzle in (known, crowded)] == ["hits", "admission"]
    assert [reason.rule for reason in reasons(alone)] == ["alone"]
    assert [reason.rule for reason in reasons(tight)][1:] == ["victim", "no admission", "no admission"]
