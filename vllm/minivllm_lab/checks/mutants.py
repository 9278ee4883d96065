"""Wrong variants of a source file, each named by a function and the piece of it that is replaced.

    MUTANTS = {"forgets the value": ("write", "keys[at], values[at] = k, v", "keys[at] = k")}

They test the checks of the exercises, and put the defects into the exhibits of the bug museum.

A piece is an expression or some statements in a row. It is compared as syntax, so line breaks,
quotes, comments and brackets do not matter, and only within the function named, so the same words
elsewhere do not either. `...` in a piece stands for any expression, or for any statements where it
is a statement; the first `...` of the replacement is what the first one stood for, and so on. An
empty replacement takes statements away.
"""

from __future__ import annotations

import ast
import difflib
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from minivllm.errors import MinivllmError
from minivllm_lab.checks.checking import module_from

Mutant = tuple[str, str, str]
"""A function (`f`, `Class.method`, `outer.inner`), a piece of it, and what stands there instead."""

Piece = ast.expr | list[ast.stmt]


def load_mutant(path: Path, mutant: Mutant) -> ModuleType:
    """Import the script with the mutant's change.

    Raises:
        MinivllmError: the function or the piece is not there exactly once, so the mutant is not
            what it says.
    """
    return module_from(mutant_source(path.read_text(), mutant, path.name), path.with_name(f"mutant_of_{path.name}"))


@functools.lru_cache(maxsize=128)
def mutant_source(source: str, mutant: Mutant, name: str = "the file") -> str:
    """Return the source with the mutant's change. The replacement stands there as the mutant spells it,
    so it brings the brackets that it needs.

    Raises:
        MinivllmError: the function or the piece is not there exactly once, or nothing changes.
    """
    changed = _spliced(source, mutant, name)
    sound = "".join(source.splitlines(keepends=True)[_slice_of(function_lines(source, mutant[0]))])
    if _dumped(changed) == _dumped(sound):
        raise MinivllmError(f"a mutant must change something; {mutant[1]!r} and {mutant[2]!r} are the same")
    return _with_function(source, mutant[0], changed)


def _with_function(source: str, name: str, text: str) -> str:
    """Return the source with `text` in place of a function's lines."""
    lines = source.splitlines(keepends=True)
    lines[_slice_of(function_lines(source, name))] = [text]
    return "".join(lines)


@functools.lru_cache(maxsize=128)
def changed_lines(before: str, after: str) -> tuple[int, ...]:
    """Return the numbers, counted from 1, of the lines in `after` that are not in `before`.

    If lines were only removed, return those on both sides of the gap.
    """
    lines: list[int] = []
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for kind, _, _, start, end in matcher.get_opcodes():
        if kind != "equal":
            lines += range(start + 1, end + 1) if end > start else (start, start + 1)
    return tuple(lines)


def function_lines(source: str, name: str) -> range:
    """Return the line numbers of a function (`f`, `Class.method`), with its decorators.

    Raises:
        MinivllmError: it is not there exactly once.
    """
    function = _function(source, name, "the file")
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return range(first, (function.end_lineno or first) + 1)


def _slice_of(line_numbers: range) -> slice:
    return slice(line_numbers.start - 1, line_numbers.stop - 1)


@functools.lru_cache(maxsize=8)
def _tree(source: str) -> ast.Module:
    """Return a file's syntax tree, parsed once for all its mutants."""
    return ast.parse(source)


def _dumped(text: str) -> str:
    """Return the syntax of one function. Parsing the whole file would take longer than all the
    rest of making a mutant.
    """
    return ast.dump(ast.parse(textwrap.dedent(text)))


def _function(source: str, where: str, name: str) -> ast.FunctionDef:
    return _only(list(_functions(_tree(source), where)), f"function {where!r}", name)


# ---- finding the piece ---------------------------------------------------------------------------


def _only(places: list, label: str, where: str):
    if len(places) != 1:
        raise MinivllmError(f"a mutant changes one place; {label} occurs {len(places) or 'no'} times in {where}")
    return places[0]


def _functions(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the functions that the path `name` leads to, through the classes and functions around
    them.
    """
    first, _, rest = name.partition(".")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if child.name == first:
                yield from _functions(child, rest) if rest else [child]
        elif not isinstance(child, ast.expr):
            yield from _functions(child, name)


def _piece(old: str, new: str) -> Piece:
    """Parse `old` as an expression if it and `new` are single ones, else as statements."""
    bodies = [ast.parse(text).body for text in (old, new)]
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in bodies):
        return bodies[0][0].value  # type: ignore[attr-defined]
    return bodies[0]


def _places(function: ast.AST, piece: Piece) -> Iterator[tuple[list, bool, list]]:
    """Yield the nodes of each place in the function where the piece occurs, whether they are all
    statements of a block, and what its `...` stand for there.
    """
    for node in ast.walk(function):
        for _, value in ast.iter_fields(node):
            for candidate in _candidates(value, piece):
                holes: list = []
                if _same(piece, candidate, holes):
                    nodes = candidate if isinstance(candidate, list) else [candidate]
                    yield nodes, nodes == value, holes


def _candidates(value: object, piece: Piece) -> Iterator[object]:
    values = value if isinstance(value, list) else [value]
    if isinstance(piece, list):
        starts = range(len(values) - len(piece) + 1) if values is value else ()
        yield from (values[start : start + len(piece)] for start in starts)
    else:
        yield from values


def _same(piece: object, node: object, holes: list) -> bool:
    """Return whether both have the same syntax; append what each `...` of the piece stands for to
    `holes`.
    """
    if _is_hole(piece) and isinstance(node, ast.expr):
        holes.append([node])
        return True
    if isinstance(piece, list) and isinstance(node, list):
        if len(piece) == 1 and isinstance(piece[0], ast.Expr) and _is_hole(piece[0].value) and node:
            holes.append(node)
            return True
        return len(piece) == len(node) and all(_same(*pair, holes) for pair in zip(piece, node, strict=True))
    if isinstance(piece, ast.AST):
        fields = [field for field in piece._fields if field != "ctx"]
        return type(piece) is type(node) and all(
            _same(getattr(piece, field), getattr(node, field), holes) for field in fields
        )
    return type(piece) is type(node) and piece == node


def _is_hole(node: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


# ---- replacing it --------------------------------------------------------------------------------


def _spliced(source: str, mutant: Mutant, name: str) -> str:
    """Return the text of the mutant's function with the replacement in place of the piece; every
    other line stays as it is.

    If statements go without a replacement, the comment above them goes, too: it would give the
    missing line away.
    """
    where, old, new = mutant
    function = _function(source, where, name)
    nodes, is_block, holes = _only(list(_places(function, _piece(old, new))), f"{old!r}", f"{where} of {name}")
    lines = source.splitlines(keepends=True)
    text = _filled(new.strip(), [_text_of(lines, hole) for hole in holes])
    start, end = nodes[0].lineno - 1, nodes[-1].end_lineno
    before = lines[start].encode()[: nodes[0].col_offset].decode()
    after = lines[end - 1].encode()[nodes[-1].end_col_offset :].decode()
    if isinstance(nodes[0], ast.stmt):
        text = text or ("pass" if is_block else "")
        text = textwrap.indent(textwrap.dedent(text), before).removeprefix(before)
    if not text:
        while start and lines[start - 1].startswith(f"{before}#"):
            start -= 1
    whole = function_lines(source, where)
    changed = [before + text + after] if text else []
    return "".join([*lines[whole.start - 1 : start], *changed, *lines[end : whole.stop - 1]])


def _text_of(source_lines: list[str], nodes: list) -> str:
    first, last = nodes[0], nodes[-1]
    lines = source_lines[first.lineno - 1 : last.end_lineno]
    if isinstance(first, ast.stmt):
        lines[0] = " " * first.col_offset + lines[0][first.col_offset :]
        return textwrap.dedent("".join(lines)).removesuffix("\n")
    lines[-1] = lines[-1].encode()[: last.end_col_offset].decode()
    lines[0] = lines[0].encode()[first.col_offset :].decode()
    return "".join(lines)


def _filled(new: str, texts: list[str]) -> str:
    """Replace each `...` in `new` with the next of `texts`."""
    constants = [node for node in ast.walk(ast.parse(new)) if isinstance(node, ast.Constant)]
    holes = sorted((node.lineno, node.col_offset) for node in constants if _is_hole(node))
    lines = new.splitlines()
    for (number, column), text in reversed(list(zip(holes, texts, strict=False))):
        line = lines[number - 1].encode()
        start, end = line[:column].decode(), line[column + 3 :].decode()
        if "\n" in text and not end:  # statements: each on a line of its own
            depth = len(start) - len(start.lstrip())
            if start.strip():  # they stood behind a colon
                start, depth = f"{start}\n", depth + 4
            else:
                start = ""
            text = textwrap.indent(text, " " * depth)
        lines[number - 1] = start + text + end
    return "\n".join(lines)
