"""Measure the repository's structure: code lines of each part, imports between packages, circular
imports.

    uv run python tools/structure.py                     # tables
    uv run python tools/structure.py --map out/map.dot   # a Graphviz file; an arrow is an import
    uv run python tools/structure.py --lesson 11         # where one lesson's files are

A code line is a line that is not blank, a comment or part of a docstring. `BUDGETS` are upper
limits that `tests/test_structure.py` enforces; raising one takes a line in CHANGELOG.md that says
why.
"""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser
from minivllm_lab.tables import table

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "vllm" / "minivllm"
PARTS = {
    "the engine": ENGINE,
    "minivllm_lab": ROOT / "vllm" / "minivllm_lab",
    "minivllm_simulate": ROOT / "vllm" / "minivllm_simulate",
    "widgets": ROOT / "widgets",
    "benchmarks": ROOT / "benchmarks",
    "the exercises": ROOT / "lessons" / "exercises",
    "tests": ROOT / "tests",
    "tools": ROOT / "tools",
}
BUDGETS = {
    "the engine": 19_000,
    "minivllm_lab": 14_200,
    "minivllm_simulate": 1_950,
    "widgets": 10_000,
    "benchmarks": 4_470,
    "the exercises": 4_330,
    "tests": 31_980,
    "tools": 4_920,
    "the spine": 3_320,
}
"""Most code lines of each part."""


@dataclass(frozen=True)
class Source:
    """Facts about a Python file, from its syntax tree."""

    code_lines: int
    imports: frozenset[str]
    """Every module that an import statement names, except in `if TYPE_CHECKING:` blocks."""
    loads: frozenset[str]
    """The modules that are imported when the file is loaded, and not inside a function."""


@functools.cache
def source(path: Path) -> Source:
    """Parse a file once for all measures, since parsing takes most of their time."""
    text = path.read_text()
    tree = ast.parse(text)
    imports = list(_imports(tree))
    loads = frozenset(name for name, at_load in imports if at_load)
    return Source(_code_lines(text, tree), frozenset(name for name, _ in imports), loads)


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield each imported module or name, and whether loading the file imports it."""
    pending: list[tuple[ast.AST, bool]] = [(tree, True)]
    while pending:
        node, at_load = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((f"{origin}.{alias.name}", at_load) for alias in node.names)
        at_load = at_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        pending += [(below, at_load) for below in _statements_below(node)]


def _statements_below(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and clauses directly below a node, without its expressions."""
    fields = ("body", "orelse", "handlers", "finalbody", "cases")
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        fields = ("orelse",)
    for field in fields:
        below = getattr(node, field, ())
        if isinstance(below, list):
            yield from below


def _code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold code."""
    inside: set[int] = set()
    docstrings: set[int] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        lines = range(getattr(node, "lineno", 1), getattr(node, "end_lineno", 0) + 1)  # empty without a place
        if isinstance(node, ast.Expr) and _is_string(node.value):
            docstrings.update(lines)
        elif _is_string(node) or isinstance(node, ast.JoinedStr):
            inside.update(lines)
        elif len(lines) != 1:  # a node of one line holds nothing of several
            pending += ast.iter_child_nodes(node)
    return sum(
        number in inside or (line != "" and not line.startswith("#"))
        for number, line in enumerate(map(str.strip, text.split("\n")), start=1)
        if number not in docstrings
    )


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def lines_of(folder: Path) -> int:
    """Count the code lines of all Python files below a folder."""
    return sum(source(path).code_lines for path in folder.rglob("*.py"))


def spine() -> list[Path]:
    """List the files that ARCHITECTURE.md names as the spine."""
    listed = (ROOT / "ARCHITECTURE.md").read_text().split("<!-- spine -->")[1].split("<!-- /spine -->")[0]
    return [ENGINE / name for name in listed.split("`") if name.endswith(".py")]


def sizes() -> dict[str, int]:
    """Return the code lines of each part that has a budget."""
    parts = {name: lines_of(folder) for name, folder in PARTS.items()}
    return parts | {"the spine": sum(source(path).code_lines for path in spine())}


# ---- imports -------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """Return the dotted name under which one of our files is imported."""
    base = ROOT if path.is_relative_to(ROOT / "widgets") else ROOT / "vllm"
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Map each of our modules to the others that it imports when it is loaded; imports inside
    functions do not count.
    """
    folders = [PARTS[name] for name in ("the engine", "minivllm_lab", "minivllm_simulate", "widgets")]
    files = {module_of(path): path for folder in folders for path in sorted(folder.rglob("*.py"))}
    return {name: known(source(path).loads, files) - {name} for name, path in files.items()}


def known(names: Iterable[str], modules: Collection[str]) -> set[str]:
    """Return the modules that these imports name, directly or as the origin of a name."""
    resolved = {name if name in modules else name.rpartition(".")[0] for name in names}
    return resolved.intersection(modules)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or indirectly (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in order:
            visit(name)
    return found


def package_of(module: str) -> str:
    """Return the package of a module, at most two names deep."""
    return ".".join(module.split(".")[:2])


def arrows_between(graph: dict[str, set[str]]) -> Counter[tuple[str, str]]:
    """Count the imports from one package to another."""
    return Counter(
        (package_of(name), package_of(other))
        for name in graph
        for other in graph[name]
        if package_of(name) != package_of(other)
    )


def drawing(graph: dict[str, set[str]]) -> str:
    """Return the packages in Graphviz's language, with an arrow from each to those that it imports."""
    packages = Counter(_box_of(name) for name in graph)
    arrows = {(_box_of(name), _box_of(other)) for name in graph for other in graph[name]}
    lines = [f'  "{name}" [label="{name}\\n{count} files"]' for name, count in sorted(packages.items())]
    lines += [f'  "{name}" -> "{other}"' for name, other in sorted(arrows) if name != other]
    return "digraph {\n  rankdir=TB; node [shape=box fontname=sans];\n" + "\n".join(lines) + "\n}\n"


def _box_of(module: str) -> str:
    first, _, rest = module.partition(".")
    package = ENGINE / rest.split(".")[0]
    return rest.split(".")[0] if first == "minivllm" and package.is_dir() and rest else first


# ---- a lesson ------------------------------------------------------------------------------------


def files_of_lesson(number: str) -> list[Path]:
    """List the files whose path has a lesson's number or name; caches and environments are left
    out.

    Raises:
        MinivllmError: there is no such lesson.
    """
    scripts = sorted((ROOT / "vllm").glob(f"{number}_*.py"))
    if not scripts:
        raise MinivllmError(f"no lesson {number!r}: give a number such as 11")
    name = scripts[0].stem.partition("_")[2]
    skipped = {".git", ".venv", "out", "__pycache__", ".hypothesis"}
    files = (path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts))
    return sorted(path for path in files if {f"{number}_{name}", name} & _stems(path, number))


def _stems(path: Path, number: str) -> set[str]:
    parts = path.relative_to(ROOT).parts
    stems = {part.partition(".")[0].removeprefix("test_") for part in parts}
    return stems | ({f"{number}_{parts[-1]}"} if parts[-1].startswith(f"{number}_") else set())


def main(arguments: argparse.Namespace) -> None:
    """Print the tables, or draw the map."""
    if arguments.lesson:
        files = files_of_lesson(arguments.lesson)
        counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
        table(f"Lesson {arguments.lesson}: {len(files)} files", ("folder", "files"), sorted(counts.items()))
        return
    graph, found = imports(), sizes()
    table(
        "Code lines", ("part", "lines", "budget"), [(name, f"{n:,}", f"{BUDGETS[name]:,}") for name, n in found.items()]
    )
    engine = {path.name: lines_of(path) for path in sorted(ENGINE.iterdir()) if path.is_dir() and path.name[0] != "_"}
    table("The engine", ("package", "lines"), [(name, f"{n:,}") for name, n in engine.items() if n])
    print(f"{len(graph)} modules, {len(arrows_between(graph))} arrows between packages, {len(circles(graph))} cycles")
    for group in circles(graph):
        print("  cycle:", ", ".join(group))
    if arguments.map:
        Path(arguments.map).write_text(drawing(graph))
        print(f"wrote {arguments.map}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--map", metavar="FILE", help="write the packages and their imports in Graphviz's dot language")
    flags.add_argument("--lesson", metavar="NN", help="list one lesson's files by folder")
    return flags


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except MinivllmError as error:
        sys.exit(f"structure.py: error: {error}")
