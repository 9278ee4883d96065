"""Write the pages of the test before and after a workshop from `workshop/quiz/questions.toml`.

    uv run python tools/quiz.py --write    # form_a.md, form_b.md and key.md
    uv run python tools/quiz.py --check    # are they up to date?

A pair of questions asks one idea twice, once in each form, so both forms have the same 24 ideas in
the same order. Where the right answer stands follows from the question's place: each letter is right
equally often.
"""

from __future__ import annotations

import argparse
import ast
import operator
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.marks import lesson_page

ROOT = Path(__file__).resolve().parents[1]
QUIZ = ROOT / "workshop" / "quiz"
LETTERS = "ABCD"
FORMS = ("A", "B")
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


@dataclass(frozen=True)
class Question:
    """One question of a form, with its four answers in the order in which they are printed."""

    lesson: str
    number: int
    ask: str
    answers: tuple[str, ...]
    meanings: tuple[str, ...]
    """The meaning of each answer: why it is right, or which mistake it reveals."""
    right: int
    value: str
    """A formula for the number with which the right answer begins, or ""."""

    @property
    def letter(self) -> str:
        """The letter of the right answer."""
        return LETTERS[self.right]


def questions(form: str, path: Path = QUIZ / "questions.toml") -> list[Question]:
    """Return the questions of form A or B."""
    pairs = tomllib.loads(path.read_text())["pair"]
    return [question(index, pair["lesson"], pair[form], form) for index, pair in enumerate(pairs)]


def question(index: int, lesson: str, entry: dict, form: str) -> Question:
    """Return a question with the right answer in its place."""
    right = (index + index // len(LETTERS) + 2 * FORMS.index(form)) % len(LETTERS)
    answers = [answer for answer, _ in entry["wrong"]]
    meanings = [meaning for _, meaning in entry["wrong"]]
    answers.insert(right, entry["right"])
    meanings.insert(right, f"Right. {entry['because']}")
    return Question(lesson, index + 1, entry["ask"], tuple(answers), tuple(meanings), right, entry.get("value", ""))


def value_of(formula: str) -> float:
    """Compute a formula of numbers, `min` and `max`.

    Raises:
        MinivllmError: the formula has something else in it.
    """
    return _value(ast.parse(formula, mode="eval").body, formula)


def _value(node: ast.AST, formula: str) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left, formula), _value(right, formula))
        case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand, formula))
        case ast.Call(ast.Name("min" | "max" as name), arguments, []):
            return {"min": min, "max": max}[name](_value(argument, formula) for argument in arguments)
    raise MinivllmError(f"{formula!r} is not a formula of numbers: use + - * / // % **, min and max")


def form_page(form: str) -> str:
    """Return the page with the questions of a form."""
    other = FORMS[1 - FORMS.index(form)].lower()
    lines = [
        f"# Test, form {form}",
        "",
        "24 questions, two a lesson, in 25 minutes. One answer of each is right. Take one form before the workshop",
        f"and the [other](form_{other}.md) after it: they ask the same 24 ideas with other numbers. The [key](key.md)",
        "says what each answer means.",
        "",
        "Name: ______________________ Date: ______________",
        "",
    ]
    lesson = ""
    for asked in questions(form):
        if asked.lesson != lesson:
            lesson = asked.lesson
            lines += [f"## Lesson {lesson}", ""]
        lines += [f"**{asked.number}.** {asked.ask}", ""]
        lines += [f"- **{letter}** {answer}" for letter, answer in zip(LETTERS, asked.answers, strict=True)]
        lines.append("")
    right = "".join(asked.letter for asked in questions(form))
    return "\n".join([*lines, f'<div class="quiz" data-right="{right}"></div>', ""])


def key_page() -> str:
    """Return the page with the right letters of both forms, and with what each answer means."""
    lines = [
        "# The key, and what each wrong answer means",
        "",
        "Count a question as right or wrong; do not count lessons that were not taught. What you compare is the same",
        "question before and after. If a third of the room gives one wrong answer, say its sentence in the next break.",
        "",
    ]
    for form in FORMS:
        letters = " · ".join(f"{asked.number} {asked.letter}" for asked in questions(form))
        lines += [f"**Form {form}:** {letters}", ""]
    for form in FORMS:
        lines += [f"## Form {form}", ""]
        for asked in questions(form):
            lesson = lesson_page(ROOT / "lessons", asked.lesson).name
            lines += [f"**{asked.number}.** {asked.ask} [Lesson {asked.lesson}](../../lessons/{lesson}).", ""]
            rows = zip(LETTERS, asked.answers, asked.meanings, strict=True)
            lines += [f"- {letter}, {answer}. {meaning}" for letter, answer, meaning in rows]
            lines.append("")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {"form_a.md": form_page("A"), "form_b.md": form_page("B"), "key.md": key_page()}


def stale(folder: Path = QUIZ) -> Iterator[str]:
    """Yield the names of the pages that are not what the questions make."""
    for name, text in pages().items():
        path = folder / name
        if not path.is_file() or path.read_text() != text:
            yield name


def main(arguments: argparse.Namespace) -> None:
    if arguments.write:
        for name, text in pages().items():
            (QUIZ / name).write_text(text)
    elif names := [*stale()]:
        raise MinivllmError(f"{', '.join(names)} differ from questions.toml: uv run python tools/quiz.py --write")


def parser() -> argparse.ArgumentParser:
    flags = Parser(prog="quiz", description=__doc__)
    flags.add_argument("--write", action="store_true", help="write the pages")
    flags.add_argument("--check", action="store_true", help="fail if a page is stale (the default)")
    return flags


if __name__ == "__main__":
    run(main, parser())
