"""Wrong variants of a source file, each named by a function and the piece of it that is replaced.

    MUTANTS = {"forgets the value": ("write", "keys[at], values[at] = k, v", "keys[at] = k")}

They test the checks of the exercises (`mutant_source`) and put the defects into the exhibits of the
bug museum (`spliced_source`, which leaves the rest of the file as it is, down to the comments).

A piece is an expression or some statements in a row. It is compared as syntax, so line breaks,
quotes, comments and brackets do not matter, and only within the function named, so the same words
elsewhere do not either. `...` in a piece stands for any expression, or for any statements where it
is a statement; the first `...` of the replacement is what the first one stood for, and so on. An
empty replacement takes statements away.
"""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.exercise import module_from

Mutant = tuple[str, str, str]
"""A function (`f`, `Class.method`, `outer.inner`), a piece of it, and what stands there instead."""

Piece = ast.expr | list[ast.stmt]
Place = tuple[ast.AST, str, slice | int | None]
"""A node, one of its fields, and where in that field: a run of statements, one item of a list,
or the whole of it.
"""


def load_mutant(path: Path, mutant: Mutant) -> ModuleType:
    """Import the script with the mutant's change.

    Raises:
        MinivllmError: the function or the piece is not there exactly once, so the mutant is not
            what it says.
    """
    return module_from(mutant_source(path.read_text(), mutant, path.name), path.with_name(f"mutant_of_{path.name}"))


def mutant_source(source: str, mutant: Mutant, name: str = "the script") -> str:
    """Return the script's source with the mutant's change, formatted by `ast.unparse`."""
    where, old, new = mutant
    tree, sound = _tree(source), _unparsed(source)
    pattern, replacement = _parsed(old, new)
    function = _only(list(_functions(tree, where)), f"function {where!r}", name)
    place, holes = _only(list(_places(function, pattern)), f"{old!r}", f"{where} of {name}")
    first, last = function.lineno, function.end_lineno
    with _replaced(place, _filled(replacement, holes)):
        changed = [
            ast.unparse(statement) if statement.lineno <= first and last <= statement.end_lineno else text
            for statement, text in zip(tree.body, sound, strict=True)
        ]
    if changed == [*sound]:
        raise MinivllmError(f"a mutant must change something; {old!r} and {new!r} are the same")
    return "\n".join(changed)


@functools.lru_cache(maxsize=8)
def _tree(source: str) -> ast.Module:
    """Return a file's syntax tree, parsed once for all its mutants, each of which restores it."""
    return ast.parse(source)


@functools.lru_cache(maxsize=8)
def _unparsed(source: str) -> tuple[str, ...]:
    """Return a file's statements as text. They are cached: most mutants leave them unchanged, and
    unparsing is most of the work.
    """
    return tuple(map(ast.unparse, _tree(source).body))


@functools.lru_cache(maxsize=128)
def spliced_source(source: str, mutant: Mutant, name: str = "the file") -> str:
    """Return the source with the mutant's change and no other: every other line stays as it is.

    The replacement is inserted as the mutant spells it, so it should follow the file's style. If it
    removes statements, the comment above them goes, too: it would give the missing line away.

    Raises:
        MinivllmError: as in `mutant_source`, or the replacement means something else where it is
            (it needs brackets).
    """
    where, old, new = mutant
    pattern, _ = _parsed(old, new)
    function = _only(list(_functions(_tree(source), where)), f"function {where!r}", name)
    (node, field, at), holes = _only(list(_places(function, pattern)), f"{old!r}", f"{where} of {name}")
    child = getattr(node, field)
    child = child if at is None else child[at]
    pieces = child if isinstance(child, list) else [child]
    only_statements = isinstance(child, list) and len(pieces) == len(getattr(node, field))
    text = _with_holes_filled(new.strip(), [_text_of(source, hole) for hole in holes])
    changed = _spliced(source, pieces, text or ("pass" if only_statements else ""))
    if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(mutant_source(source, mutant, name))):
        raise MinivllmError(f"{new!r} in {where} of {name} means something else there: put it in brackets")
    return changed


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
    function = _only(list(_functions(ast.parse(source), name)), f"function {name!r}", "the file")
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return range(first, function.end_lineno + 1)


def _spliced(source: str, pieces: list, text: str) -> str:
    """Return the source with `text` in place of the consecutive nodes `pieces`."""
    lines = source.splitlines(keepends=True)
    first, last = pieces[0], pieces[-1]
    line = lines[first.lineno - 1].encode()
    before, after = (
        line[: first.col_offset].decode(),
        lines[last.end_lineno - 1].encode()[last.end_col_offset :].decode(),
    )
    start = first.lineno - 1
    if not text:
        while start and lines[start - 1].startswith(f"{before}#"):
            start -= 1
        return "".join([*lines[:start], *lines[last.end_lineno :]])
    if isinstance(first, ast.stmt):
        text = textwrap.indent(textwrap.dedent(text), before).lstrip()
    return "".join([*lines[:start], before + text + after, *lines[last.end_lineno :]])


def _text_of(source: str, hole: ast.AST | list[ast.stmt]) -> str:
    nodes = hole if isinstance(hole, list) else [hole]
    return "\n".join(ast.get_source_segment(source, node) or "" for node in nodes)


def _with_holes_filled(new: str, texts: list[str]) -> str:
    """Replace each `...` in `new` with the next of `texts`."""
    holes = [node for node in ast.walk(ast.parse(new)) if isinstance(node, ast.Constant) and _is_hole(node)]
    lines = new.splitlines()
    in_order = sorted(holes, key=lambda node: (node.lineno, node.col_offset))
    for node, text in reversed(list(zip(in_order, texts, strict=False))):
        line = lines[node.lineno - 1].encode()
        start, end = line[: node.col_offset].decode(), line[node.end_col_offset :].decode()
        lines[node.lineno - 1] = start + text + end
    return "\n".join(lines)


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


def _parsed(old: str, new: str) -> tuple[Piece, Piece]:
    """Parse both as expressions if each is a single one, else both as statements."""
    first, second = ast.parse(old).body, ast.parse(new).body
    if all(len(body) == 1 and isinstance(body[0], ast.Expr) for body in (first, second)):
        return first[0].value, second[0].value  # type: ignore[attr-defined]
    return first, second


def _places(function: ast.AST, piece: Piece) -> Iterator[tuple[Place, list]]:
    """Yield each place in the function where the piece occurs, and what its `...` stand for there."""
    for node in ast.walk(function):
        for field, value in ast.iter_fields(node):
            for at, candidate in _candidates(value, piece):
                holes: list = []
                if _same(piece, candidate, holes):
                    yield (node, field, at), holes


def _candidates(value: object, piece: Piece) -> Iterator[tuple[slice | int | None, object]]:
    if not isinstance(piece, list):
        yield from enumerate(value) if isinstance(value, list) else [(None, value)]
    elif isinstance(value, list):
        for start in range(len(value) - len(piece) + 1):
            run = slice(start, start + len(piece))
            yield run, value[run]


def _same(piece: object, node: object, holes: list) -> bool:
    """Return whether both have the same syntax; append what each `...` of the piece stands for to
    `holes`.
    """
    if _is_hole(piece) and isinstance(node, ast.expr):
        holes.append(node)
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


def _filled(piece: Piece, holes: list) -> Piece:
    """Return the replacement with each `...` filled with what the pattern's stood for."""
    left = iter(copy.deepcopy(holes))

    class Fill(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr):
            return next(left, node) if _is_hole(node.value) else self.generic_visit(node)

        def visit_Constant(self, node: ast.Constant):
            return next(left, node) if _is_hole(node) else node

    if isinstance(piece, list):
        return Fill().visit(ast.Module(piece, [])).body
    return Fill().visit(piece)


@contextmanager
def _replaced(place: Place, piece: Piece) -> Iterator[None]:
    """Put the piece in that place for the length of a `with` block."""
    node, field, at = place
    before = getattr(node, field)
    after: Any = piece
    if at is not None:
        after = [*before]
        after[at] = piece
    setattr(node, field, after or [ast.Pass()])
    try:
        yield
    finally:
        setattr(node, field, before)
