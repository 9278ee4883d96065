"""Say whether an assistant's answer gives the solution of an exercise away.

    uv run python tools/tutor.py 04 answer.md     # the answer as text or Markdown; - reads standard input

Statements of the lesson's script that solve the exercise are compared with every piece of the answer
that is Python, after all names, strings and comments are taken out: other names do not help. One
statement alone is no solution, but three in a row are, or a whole short function.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1", re.DOTALL | re.MULTILINE)
ROW = 3  # statements that make a solution
Shape = str


def shapes(code: str) -> list[Shape]:
    """Return the shape of each simple statement, and of each head of a loop or a condition, in order."""
    return [shape for node in ast.parse(code).body for shape in shapes_of(node)]


def shapes_of(node: ast.stmt) -> Iterator[Shape]:
    """Yield the shapes of a statement and of those in it; docstrings, imports and names of functions have none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inner = node.body
    elif isinstance(node, ast.If | ast.While):
        yield f"{type(node).__name__} {bare(node.test)}"
        inner = [*node.body, *node.orelse]
    elif isinstance(node, ast.For | ast.AsyncFor):
        yield f"For {bare(node.iter)}"
        inner = [*node.body, *node.orelse]
    elif isinstance(node, ast.With | ast.Try):
        inner = node.body
    else:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_text or isinstance(node, ast.Import | ast.ImportFrom | ast.Pass | ast.Raise)):
            yield bare(node)
        return
    for statement in inner:
        yield from shapes_of(statement)


def bare(node: ast.AST) -> Shape:
    """Return a piece of syntax without the names and strings in it."""
    text = ast.dump(node)
    return re.sub(r"(?:id|arg|name|attr|type_comment)='[^']*'|value='[^']*'|ctx=\w+\(\)", "_", text)


def solution_parts(number: str) -> dict[str, list[Shape]]:
    """Map the functions and methods that an exercise asks for to the shapes of their solution.

    Raises:
        MinivllmError: there is no such exercise.
    """
    stubs, scripts = (sorted((ROOT / place).glob(f"{number.zfill(2)}_*.py")) for place in ("lessons/exercises", "vllm"))
    if not stubs or not scripts:
        raise MinivllmError(f"there is no exercise {number!r}")
    asked = {name for name, node in functions(stubs[0].read_text()) if "NotImplementedError" in ast.dump(node)}
    return {name: [*shapes_of(node)] for name, node in functions(scripts[0].read_text()) if name in asked}


def functions(code: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions of a file, and the methods of its classes as `Class.method`."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{getattr(node, 'name', '')}.{inner.name}", inner


def code_of(answer: str) -> Iterator[str]:
    """Yield the pieces of an answer that are Python: its fences, or all of it."""
    for piece in [match[2] for match in FENCE.finditer(answer)] or [answer]:
        code = textwrap.dedent(piece)
        for attempt in (code, f"def f():\n{textwrap.indent(code, '    ')}"):
            try:
                ast.parse(attempt)
            except SyntaxError:
                continue
            yield attempt
            break


def given_away(number: str, answer: str) -> list[str]:
    """Return the names of the functions whose solution is in an answer."""
    said = [shapes(code) for code in code_of(answer)]
    return [name for name, solution in solution_parts(number).items() if any(overlaps(solution, row) for row in said)]


def overlaps(solution: list[Shape], said: list[Shape]) -> bool:
    """Return whether three statements in a row, or all of a shorter solution, are in what was said."""
    length = min(ROW, len(solution))
    windows = {tuple(said[at : at + length]) for at in range(len(said) - length + 1)}
    return any(tuple(solution[at : at + length]) in windows for at in range(len(solution) - length + 1))


def main(arguments: argparse.Namespace) -> None:
    try:
        answer = sys.stdin.read() if arguments.answer == "-" else Path(arguments.answer).read_text()
    except OSError as error:
        raise MinivllmError(f"cannot read {arguments.answer}: {error.strerror}") from error
    found = given_away(arguments.number, answer)
    print(f"gives away: {', '.join(found)}" if found else "no code of the solution is in it; now read it for words")
    if found:
        raise SystemExit(1)


def parser() -> argparse.ArgumentParser:
    flags = Parser(prog="tutor", description=__doc__)
    flags.add_argument("number", help="the lesson's number, such as 04")
    flags.add_argument("answer", help="a file with the assistant's answer, or -")
    return flags


if __name__ == "__main__":
    run(main, parser())
