"""Find docstrings, comments and messages that do not read as plain English.

    uv run python tools/english.py               # every Python file that git knows
    uv run python tools/english.py vllm widgets  # some folders

The rules are few and raise no false alarms, so `make lint` runs them. A docstring is a sentence in
the imperative; a property's may be a noun phrase. It must not begin with a word that opens a clause
without a verb of its own ("Whose block it is.", "Of one layer."). A few phrases that no native
speaker would use are rejected everywhere. Ruff's D401 checks the mood of the verb.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("tools/english.py",)
"""This file quotes what it forbids."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

HEADLESS = re.compile(
    r"(Of|By|As|Whose|What|Who|Whom|Which|Where|When|Why|With|Without|From|For|At|In|On|Than|So|Those|That"
    r"|Nobody|Somebody|Whoever|Whether|How)\b(?!-)"
)
"""Words that a docstring does not begin with: what follows is a clause, a phrase or a riddle."""

OF_A_PROPERTY = ("Whether", "How", "When", "From")
"""Words that the docstring of a property may begin with."""

FEWEST_WORDS = 3
"""A docstring of fewer words repeats its function's name, unless it names a kernel's grid or an interface."""

PHRASES = {
    re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE): instead
    for pattern, instead in {
        r"\b(?:is|are) asked for\b": "say what to do: 'Use an H100.'",
        r"\bwho waits\b": "'the waiting request'",
        r"\bso many (?!\w+ that\b)": "'n', 'that many', or the number's name",
        r"\bfrom (?!now\b|then\b|here\b)(?:(?!never\b)\S+ ){1,3}on(?=[,.;:)]|$)": "'starting at', 'after'",
        r"\banew\b": "'again'",
        r"\bwhoever\b": "name who it is",
        r"\b(?:mend|mends) (?:it|them|this) first\b": "'Fix that first.'",
    }.items()
}
"""Turns of phrase and what to write in their place."""


def problems(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and a message for everything in a file that breaks a rule."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    is_test = path.is_relative_to(ROOT / "tests")  # tests quote learners, and may have short docstrings
    for node in ast.walk(tree):
        if isinstance(node, Documented):
            yield from _docstring_problems(node, 1 if is_test else FEWEST_WORDS)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_test:
            yield from _phrase_problems(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _phrase_problems(token.start[0], token.string)


def _docstring_problems(node: Documented, fewest_words: int) -> Iterator[tuple[int, str]]:
    words = (ast.get_docstring(node) or "").split()
    if not words:
        return
    line = node.body[0].lineno
    name = "the module" if isinstance(node, ast.Module) else node.name
    head = HEADLESS.match(words[0])
    if head and not (is_property(node) and head.group() in OF_A_PROPERTY) and not name.startswith("check_"):
        yield line, f"the docstring of {name} begins with '{words[0]}': write a sentence with a verb"
    elif words[0] == "See" or (len(words) < fewest_words and words[0] not in ("Implement", "Implements", "Grid")):
        yield line, f"the docstring of {name} says nothing: delete it, or say what the name does not"


def is_property(node: Documented) -> bool:
    """Return whether a function is read like an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _phrase_problems(line: int, text: str) -> Iterator[tuple[int, str]]:
    for pattern, instead in PHRASES.items():
        for match in pattern.finditer(text):
            yield line + text.count("\n", 0, match.start()), f"'{' '.join(match.group().split())}': write {instead}"


def python_files(folders: list[str]) -> list[Path]:
    """List the Python files that git tracks in `folders`, or in the whole repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *(f"{folder.rstrip('/')}" for folder in folders)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    names = [name for name in listed if name.endswith(".py") and not name.startswith(LEFT_OUT)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def main() -> int:
    """Print one line for each problem; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="folders or files (default: all)")
    faults = 0
    for path in python_files(parser.parse_args().folders):
        for line, fault in sorted(problems(path)):
            print(f"{path.relative_to(ROOT)}:{line}: {fault}")
            faults += 1
    if faults:
        print(f"{faults} places to rewrite", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
