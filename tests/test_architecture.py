"""ARCHITECTURE.md names files and functions: each of them exists, and the spine takes a weekend to
read, not a month.
"""

import ast
import re
from pathlib import Path

import pytest
from repository import ROOT

ENGINE = ROOT / "vllm" / "minivllm"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def between(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]


def hops(mark: str) -> list[tuple[str, str]]:
    """Return (file, function) of each row of a table, whose rows are numbered in order."""
    rows = re.findall(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", between(mark), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, len(rows) + 1)]
    return [(file, function) for _, file, function in rows]


WAY = hops("way")


def definitions(path: Path) -> set[str]:
    """Return the functions, classes and methods of a file; methods as the class's name, a dot and
    their own.
    """
    result = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            result.add(node.name)
        if isinstance(node, ast.ClassDef):
            result |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, FUNCTIONS)}
    return result


@pytest.mark.parametrize(("file", "function"), WAY, ids=[function for _, function in WAY])
def test_every_hop_exists(file, function):
    assert function in definitions(ENGINE / file)


def test_the_way_is_told_whole():
    """Each package of the engine that a request goes through has a hop, and the front end is
    first and last.
    """
    assert WAY[0][1] == "LLM.generate"
    assert WAY[-1][1] == "OutputProcessor.process_outputs"
    packages = {file.split("/")[0] for file, _ in WAY}
    assert packages == {"entrypoints", "engine", "core", "worker", "models", "kernels"}


def test_the_page_is_short():
    assert len(PAGE.split()) <= 1500


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", PAGE))))
def test_every_file_and_folder_that_is_named_exists(name):
    assert any((place / name).exists() for place in (ENGINE, ROOT, ROOT / "vllm", ENGINE / "executor")), name
