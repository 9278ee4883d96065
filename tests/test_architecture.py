"""ARCHITECTURE.md names files and functions: each of them exists, and the spine is a weekend, not a month."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "vllm" / "minivllm"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def between(mark: str) -> str:
    return PAGE.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]


HOPS = re.findall(r"^\| \d+ \| `([^`]+)` \| `([^`]+)` \|", between("way"), re.MULTILINE)
SPINE = re.findall(r"`([\w/]+\.py)`", between("spine"))


def definitions(path: Path) -> set[str]:
    """Functions, classes and methods of a file; those of classes after the class's name and a dot."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "function"), HOPS, ids=[function for _, function in HOPS])
def test_every_hop_exists(file, function):
    assert function in definitions(ENGINE / file)


def test_the_way_is_told_whole():
    assert len(HOPS) == 20
    assert HOPS[0][1] == "LLM.generate"
    assert HOPS[-1][1] == "OutputProcessor.process_outputs"


def test_the_spine_can_be_read_in_a_weekend():
    lines = {file: len((ENGINE / file).read_text().splitlines()) for file in SPINE}
    assert 20 <= len(lines) <= 26
    assert sum(lines.values()) < 5500


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", PAGE))))
def test_every_file_and_folder_that_is_named_exists(name):
    assert any((place / name).exists() for place in (ENGINE, ROOT, ROOT / "vllm", ENGINE / "executor")), name
