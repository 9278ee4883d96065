"""The game in a terminal: a right answer counts, a wrong one is explained, bad lines are asked again."""

import io
import re
import sys

import pytest
from rich.console import Console

from minivllm_lab.predict import game
from minivllm_lab.predict.game import main
from minivllm_lab.predict.levels import load
from minivllm_lab.predict.rounds import Round


def play(monkeypatch: pytest.MonkeyPatch, lines: list[str], *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["predict", *flags])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    main()


def right(puzzle: Round) -> str:
    tokens = [f"{name} {count}" for name, count in puzzle.decision.tokens.items()]
    return " ".join([*tokens, *(f"-{name}" for name in puzzle.decision.preempted)]) or "none"


def test_all_rounds_of_a_level_answered_rightly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, level in enumerate(load(), start=1):
        play(monkeypatch, [right(puzzle) for puzzle in level], "--level", str(number))
        assert f"{len(level)} of {len(level)} right" in capsys.readouterr().out


def test_wrong_shown_and_unreadable_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load()[0][0]
    play(monkeypatch, ["what", right(first), "?", "q"], "--level", "1")
    shown = capsys.readouterr()
    assert "1 of 2 right," in shown.out
    assert shown.out.count("vLLM decided:") == 1
    assert "cannot be read" in shown.err


def test_a_wrong_answer_has_a_second_try(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = load()[0][0]
    play(monkeypatch, ["none", right(first), "none", "none", "none", "", "q"], "--level", "1")
    out = capsys.readouterr().out
    told = out.split("Round 2")[0]
    assert "Look at " in told
    assert "Right." in told
    assert "vLLM decided" not in told
    assert out.count("vLLM decided:") == 2
    assert "0 of 3 right, 1 more at the second try" in out


def test_no_line_is_longer_than_eighty_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(game, "console", Console(width=200))
    for number, level in enumerate(load(), start=1):
        play(monkeypatch, ["none"] * 2 * len(level), "--level", str(number))
        # Nobody ends the line of a prompt with Enter here.
        lines = re.split(r"\n|> ", capsys.readouterr().out)
        assert 70 < max(map(len, lines)) <= 80


def test_the_end_of_the_input_ends_the_game(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, [], "--endless", "--level", "4")
    assert "Round 1" in capsys.readouterr().out


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        play(monkeypatch, [], "--level", "9")
    assert ended.value.code == 2
    assert "must be from 1 to 7" in capsys.readouterr().err
