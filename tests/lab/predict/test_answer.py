"""A prediction is read leniently, judged by tokens and victims, and corrected by the rule it missed."""

from dataclasses import replace
from random import Random

import pytest
from lab.predict.by_hand import HABITS, Learner

from minivllm.errors import MinivllmError
from minivllm_lab.predict.answer import diagnose, is_right, parse
from minivllm_lab.predict.describe import explain, reasons
from minivllm_lab.predict.levels import load
from minivllm_lab.predict.mistakes import MISTAKES, RULES
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
    ("text", "says", "rule"),
    [
        ("A 8 B 1 C 2", MISTAKES["decodes first"].says, "order"),
        ("A 11 B 1", "A lacks 10 tokens, so it cannot get 11.", "all it lacks"),
        ("A 10 B 1", "A gets 10, but no request may get more than 8 here.", "chunk limit"),
        ("A 8 B 1 C 8", "Your step has 17 tokens, but its budget is 12.", "budget"),
        ("A 8 B 1 -C", "C waits, so it holds no blocks that a preemption could free.", "preemption"),
        ("A 8 C 3 -B", "Look at B: you preempt it.", "blocks"),
        ("B 1 C 3", "Look at A: you give it nothing.", "chunk limit"),
        ("A 8 C 3", "Look at B: you give it nothing.", "all it lacks"),
    ],
)
def test_a_wrong_answer_is_told_a_rule(text: str, says: str, rule: str) -> None:
    assert diagnose(parse(text, STEP), STEP) == [(says, RULES[rule])]


def test_more_requests_than_seats_are_told() -> None:
    full = replace(STEP, seats=2, decision=Decision({"A": 8, "B": 1}))
    assert diagnose(parse("A 8 B 1 C 3", full), full) == [
        ("After your step 3 requests run, but there are 2 seats.", RULES["seats"])
    ]


def test_two_wrong_rules_with_one_answer_are_both_told() -> None:
    step = replace(STEP, mistakes=dict.fromkeys(("decodes first", "shortest first", "no seats"), Decision({"B": 1})))
    assert [rule for _, rule in diagnose(Decision({"B": 1}), step)] == [RULES["order"], RULES["seats"]]


def test_every_wrong_rule_is_told_by_the_rule_it_breaks_or_two_others_say_as_much() -> None:
    for puzzle in ROUNDS:
        assert is_right(puzzle.decision, puzzle)
        for name, wrong in puzzle.mistakes.items():
            told = [rule for _, rule in diagnose(wrong, puzzle)]
            assert RULES[MISTAKES[name].rule] in told or len(told) == 2, (puzzle.source, name)


def test_every_round_can_be_solved_by_hand() -> None:
    for puzzle in ROUNDS:
        assert is_right(Learner(puzzle).decide(), puzzle), puzzle.source


def test_a_learner_with_a_wrong_habit_is_told_its_rule() -> None:
    told: dict[str, list[bool]] = {habit: [] for habit in HABITS}
    for puzzle in ROUNDS:
        for habit, names in HABITS.items():
            answer = Learner(puzzle, habit).decide()
            if not is_right(answer, puzzle):
                told[habit].append(any(rule in [RULES[name] for name in names] for _, rule in diagnose(answer, puzzle)))
    assert all(told.values())
    assert min(sum(each) / len(each) for each in told.values()) >= 0.5
    every = [right for each in told.values() for right in each]
    assert len(every) > 500
    assert sum(every) >= 0.95 * len(every)


def test_a_slip_in_one_request_is_told_a_rule() -> None:
    draw = Random(4)
    for puzzle in ROUNDS:
        for _ in range(20):
            row = draw.choice(list(puzzle.requests.values()))
            slip = Decision({**puzzle.decision.tokens, row.name: draw.randint(1, row.lacks + 2)})
            slip = replace(slip, preempted=puzzle.decision.preempted - {row.name})
            if not is_right(slip, puzzle):
                assert diagnose(slip, puzzle)[0][1] in RULES.values()


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
    assert [reason.rule for reason in reasons(STEP)] == ["chunk limit", "all it lacks", "budget"]
    assert [reason.rule for reason in reasons(full)][2:] == ["seats", "queue"]
    assert [reason.rule for reason in reasons(tight)][1:] == ["victim", "no admission", "no admission"]
