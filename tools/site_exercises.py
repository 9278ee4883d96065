"""Prepare the exercises for the site's editor: the part of a stub whose checks need Python alone.

A page's Python has neither torch nor Triton nor NumPy. So the editor shows the lines of the stub
from the first to the last function that the checks in `lessons/exercises/checks` call, with the
imports that a page can do. The file that the page exports has the rest of the stub around them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import site_pages

from notebooks import Fence, read_lesson

EXERCISES = Path("lessons", "exercises")
RECORDED = Path("tests", "conformance", "data")
"""The decisions of vLLM's scheduler that some checks compare with."""
NOT_IN_A_PAGE = ("numpy", "torch", "triton", "minivllm.platforms", "minivllm_lab.key_walk")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Exercise:
    """An exercise's part that a page can check; `head + text + tail` is the file for `make check`."""

    name: str
    head: str
    text: str
    tail: str
    statements: list[str]
    """The statements of its checks, in order."""
    widget: str
    """The widget that can show it, or ""."""
    own: dict[str, str]
    """Arguments of the widget's `show`, each with the reader's function or class for it."""


def checks(root: Path) -> list[Path]:
    """Return the files of checks that need Python alone."""
    return sorted((root / EXERCISES / "checks").glob("[0-9][0-9]_*.py"))


def exercises(root: Path) -> dict[str, Exercise]:
    """Return the exercises that a page can check, by name."""
    return {path.stem: exercise(root, path) for path in checks(root)}


def exercise(root: Path, checks_file: Path) -> Exercise:
    """Return the part of an exercise that these checks are for."""
    name, checked = checks_file.stem, ast.parse(checks_file.read_text()).body
    stub = (root / EXERCISES / checks_file.name).read_text()
    lines, body = stub.splitlines(keepends=True), ast.parse(stub).body
    start, end = shown_lines(body, checked)
    before = [node for node in body if node.end_lineno and node.end_lineno <= start]
    imports = [node for node in before if isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [index for node in imports if _works_in_a_page(node) for index in range(node.lineno - 1, _end(node))]
    defined = {node.name for node in ast.parse("".join(lines[start:end])).body if isinstance(node, Definition)}
    widget, own = widget_of(root / "lessons" / f"{name}.md")
    own = {argument: part for argument, part in own.items() if part in defined}
    return Exercise(
        name=name,
        head="".join(lines[index] for index in range(start) if index not in kept).rstrip() + "\n\n",
        text="".join(lines[index] for index in kept) + "\n\n" * bool(kept) + "".join(lines[start:end]).lstrip(),
        tail="".join(lines[end:]),
        statements=[(ast.get_docstring(node) or "").splitlines()[0] for node in _check_functions(checked)],
        widget=widget if own else "",
        own=own,
    )


def shown_lines(stub: list[ast.stmt], checks: list[ast.stmt]) -> tuple[int, int]:
    """Return the lines of a stub that the editor shows: from the first to the last definition that
    the checks use, and those just before that are given.
    """
    named = {node.attr for check in checks for node in ast.walk(check) if isinstance(node, ast.Attribute)}
    used = [index for index, node in enumerate(stub) if isinstance(node, Definition) and node.name in named]
    first = used[0]
    while isinstance(stub[first - 1], Definition) and "NotImplementedError" not in ast.dump(stub[first - 1]):
        first -= 1
    return _end(stub[first - 1]), _end(stub[used[-1]])


def widget_of(lesson: Path) -> tuple[str, dict[str, str]]:
    """Return the widget that a lesson shows with the reader's part (`mine.schedule`), and which
    part each argument takes.
    """
    cells = [part for part in read_lesson(lesson).parts if isinstance(part, Fence) and part.kind == "exec"]
    for call in (node for cell in cells for node in ast.walk(ast.parse("\n".join(cell.body)))):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=widget), attr="show"), keywords=keys):
                if own := dict(_mine(keys)):
                    return widget, own
    return "", {}


def _mine(keys: list[ast.keyword]) -> Iterator[tuple[str, str]]:
    for key in keys:
        match key.value:
            case ast.Attribute(value=ast.Name(id="mine"), attr=part):
                yield str(key.arg), part


def _check_functions(nodes: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
            yield node


def _works_in_a_page(node: ast.Import | ast.ImportFrom) -> bool:
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return not any(module.startswith(NOT_IN_A_PAGE) for module in modules)


def _end(node: ast.stmt) -> int:
    assert node.end_lineno
    return node.end_lineno


def html(name: str) -> str:
    """Return the place of an exercise on its page: without the editor, it says what to do instead."""
    number = name[:2]
    return site_pages.one_line(
        f'<div class="exercise" data-exercise="{name}"><p class="widget-note">You can write and check this exercise on '
        "the page itself if it comes from a server and your browser has WebAssembly. Here, solve it in the lesson's "
        f"notebook, or edit <code>{EXERCISES / name}.py</code> and run <code>make check N={number}</code>.</p></div>"
        f'<script src="../_static/exercises/{name}.js" defer></script>'
        '<script src="../_static/exercise.js" defer></script>'
    )


def script(part: Exercise) -> str:
    """Return an exercise as a script: a page opened from disk may load scripts."""
    return f"(window.exercises ??= {{}})[{json.dumps(part.name)}] = {json.dumps(asdict(part), ensure_ascii=False)};\n"
