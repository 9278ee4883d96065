"""A prediction is read leniently, judged by tokens and victims, and corrected by the rule it missed."""

from dataclasses import replace

import pytest

from minivllm.errors import MinivllmError
from minivllm_lab.predict.answer import diagnose, is_right, parse
from minivllm_lab.predict.describe import explain
from minivllm_lab.predict.levels import load
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.rounds import Decision, Round, Row

ROUNDS = [puzzle for level in load() for puzzle in level]

STEP = Round(
    source="by hand",
    policy="fcfs",
    budget=12,
    threshold=8,
    seats=3,
    chunked=True,
    block_size=4,
    free=9,
    running=(
        Row("A", known=20, computed=10, blocks=3, priority=0),
        Row("B", known=5, computed=4, blocks=2, priority=0),
    ),
    waiting=(Row("C", known=9, computed=0, blocks=0, priority=0),),
    decision=Decision({"A": 8, "B": 1, "C": 3}),
    mistakes={"decodes first": Decision({"B": 1, "A": 8, "C": 2})},
)


@pytest.mark.parametrize("text", ["A 8 B 1 C 3", "c3, b1; a:8", "B=1 A=8 C=3 ", "A8B1C3"])
def test_an_answer_is_read_leniently(text: str) -> None:
    assert is_right(parse(text, STEP), STEP)


def test_victims_have_a_minus_and_nobody_is_none() -> None:
    assert parse("A 2 -b", STEP) == Decision({"A": 2}, frozenset("B"))
    assert parse("none", STEP) == Decision({})
    assert parse("A 0 B 1", STEP) == Decision({"B": 1})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the line is empty"),
        ("A", "'A' cannot be read"),
        ("A 1 Z 2", "there is no request Z; there are A, B, C"),
        ("A 1 A 2", "A is named twice"),
        ("A 1 -A", "A is named twice"),
        ("A 1 everything", "'everything' cannot be read"),
        ("A -1", "'A -1' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(MinivllmError, match=says):
        parse(text, STEP)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("A 8 B 1 C 2", MISTAKES["decodes first"].says),
        ("A 11 B 1", "A lacks 10 tokens, so it cannot get 11"),
        ("A 10 B 1", "no request may get more than 8"),
        ("A 8 B 1 C 8", "Your step has 17 tokens; its budget is 12"),
        ("A 8 B 1 -C", "C waits, so it holds nothing"),
        ("A 8 C 3 -B", "B is not preempted"),
        ("B 1 C 3", "A gets 8, where you gave it nothing"),
    ],
)
def test_a_wrong_answer_is_corrected(text: str, says: str) -> None:
    assert says in diagnose(parse(text, STEP), STEP)[0]


def test_more_requests_than_seats_are_told() -> None:
    assert "there are 2 seats" in diagnose(parse("A 8 B 1 C 3", STEP), replace(STEP, seats=2, decision=Decision({})))[0]


def test_every_recorded_mistake_is_recognized_and_every_decision_right() -> None:
    for puzzle in ROUNDS:
        assert is_right(puzzle.decision, puzzle)
        for name, wrong in puzzle.mistakes.items():
            assert any(MISTAKES[name].says in sentence for sentence in diagnose(wrong, puzzle)), (puzzle.source, name)


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
