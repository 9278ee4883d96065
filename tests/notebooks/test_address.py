"""The public address is defined in one place; whatever quotes it agrees, and one command changes
it.
"""

import subprocess
from pathlib import Path

import address
import pytest
from refusals import assert_refused
from repository import ROOT

HERE, NEW = "https://github.com/someone/course", "https://github.com/other-one/lessons.new"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository whose address is in four files."""
    files = {
        "pyproject.toml": f'[project]\nname = "course"\n[project.urls]\nRepository = "{HERE}"\n',
        "CITATION.cff": f"license: x\nrepository-code: {HERE}\n",
        "README.md": f"git clone {HERE} && cd course; https://github.com/vllm-project/vllm and someone else\n",
        "notes.md": "[a](https://colab.research.google.com/github/someone/course/blob/main/notebooks/a.ipynb)\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe\x00")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_this_repository_has_one_address():
    assert address.strangers() == []
    quoting = [name for name, text in address.tracked_text(ROOT).items() if address.address() in text]
    assert {"pyproject.toml", "CITATION.cff", "README.md", "notebooks/01_kv_cache.ipynb"} <= set(quoting)


def test_nothing_opens_in_colab_before_the_repository_is_published(root: Path):
    assert address.colab("a", root)
    address.change(root, "https://github.com/OWNER/course")
    assert address.colab("a", root) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see https://github.com/me/course", "more.md: me/course, not someone/course"),
        ("https://colab.research.google.com/github/me/fork/blob/x", "more.md: me/fork, not someone/course"),
        ("https://mybinder.org/v2/gh/me/fork/main", "more.md: me/fork, not someone/course"),
        ("git clone ADDRESS-OF-THE-REPOSITORY", "more.md: 'ADDRESS-OF-THE' is a placeholder for an address"),
        ("https://github.com/<owner>/x", "more.md: '<owner>' is a placeholder for an address"),
    ],
)
def test_another_address_is_named(root: Path, text: str, said: str):
    (root / "more.md").write_text(text)
    assert address.strangers(root) == [said]


def test_a_citation_without_it_is_named(root: Path):
    (root / "CITATION.cff").write_text("license: x\n")
    assert address.strangers(root) == [f"CITATION.cff: `repository-code: {HERE}` is missing"]


def test_one_command_changes_it_everywhere(root: Path):
    assert sorted(address.change(root, NEW)) == ["CITATION.cff", "README.md", "notes.md", "pyproject.toml"]
    assert address.address(root) == NEW
    assert address.strangers(root) == []
    assert address.colab("a", root).endswith("/github/other-one/lessons.new/blob/main/notebooks/a.ipynb")
    assert "vllm-project/vllm" in (root / "README.md").read_text()


@pytest.mark.parametrize("bad", ["", "https://example.org/a", f"{HERE}/more/parts", "someone/course"])
def test_what_is_no_address_is_refused(root: Path, bad: str):
    assert_refused(r"OWNER/NAME", address.change, root, bad)
    assert address.address(root) == HERE
