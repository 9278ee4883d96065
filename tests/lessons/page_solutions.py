"""Solutions that the tests type into the page's editor, taken from a lesson's script: whole, or with
one of the mistakes of `tests/lessons`.
"""

import ast
import functools
from collections.abc import Iterator

from lessons.mistakes import mutants_of
from repository import ROOT

from minivllm_lab.checks.mutants import Mutant, mutant_source

IMPORT = ast.Import, ast.ImportFrom
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def solution(number: str, text: str, mutant: Mutant | None = None) -> str:
    """Return the script's definitions for those that a page's stub asks for, with all that they
    use. What the stub gives stays as it is.
    """
    lines = map(ast.unparse, _reached(number, text, mutant))
    return "\n".join(line for line in lines if line != "import torch") + "\n"


def mutants(number: str, text: str) -> dict[str, Mutant]:
    """Return the mistakes of `tests/lessons` in what the page's checks call, or what that uses."""
    (checks,) = (ROOT / "lessons" / "exercises" / "checks").glob(f"{number}_*.py")
    called = {node.attr for node in ast.walk(ast.parse(checks.read_text())) if isinstance(node, ast.Attribute)}
    checked = "\n".join(ast.unparse(node) for node in ast.parse(text).body if getattr(node, "name", "") in called)
    used = {name for node in _reached(number, checked) if node not in _given(checked) for name in _names(node)}
    return {mistake: mutant for mistake, mutant in mutants_of(number).items() if mutant[0].partition(".")[0] in used}


@functools.cache
def _given(text: str) -> list[ast.stmt]:
    """Return the statements of a stub that are not to be written."""
    return [node for node in ast.parse(text).body if "NotImplementedError" not in ast.dump(node)]


def _reached(number: str, text: str, mutant: Mutant | None = None) -> list[ast.stmt]:
    """Return the statements that define what the stub asks for, and all that those name, imports first."""
    (script,) = (ROOT / "vllm").glob(f"{number}_*.py")
    source = script.read_text()
    body = ast.parse(mutant_source(source, mutant, script.name) if mutant else source).body
    named = {name: _without_annotations(node) for node in body + _given(text) for name in _names(node)}
    pending = [node.name for node in ast.parse(text).body if isinstance(node, Definition)]
    reached = set()
    while pending:
        name = pending.pop()
        if name in named and name not in reached:
            reached.add(name)
            pending += [node.id for node in ast.walk(named[name]) if isinstance(node, ast.Name)]
    nodes = {id(node): node for name, node in named.items() if name in reached}.values()
    return sorted(nodes, key=lambda node: not isinstance(node, IMPORT))


def _without_annotations(node: ast.stmt) -> ast.stmt:
    """Remove what functions say about types: a page has not all of these names."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.annotation = None
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            part.returns = None
    return node


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in names)
