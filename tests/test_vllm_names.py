"""Test that vLLM's names in our texts exist in v0.33.0: a misspelt one is found wherever it is."""

import functools
import io
import tarfile
from pathlib import Path

import pytest
import vllm_names as tool

BLOB = "https://github.com/vllm-project/vllm/blob/v0.33.0"
POOL = f"[`vllm/v1/core/block_pool.py`]({BLOB}/vllm/v1/core/block_pool.py)"
MODULE = """
LIMIT: int = 3
class BlockPool:
    size: int
    def __init__(self):
        self.free = []
    def get_new_blocks(self, num_blocks):
        return num_blocks
def hash_block(): ...
"""


@functools.cache
def committed_list():
    return tool.read_list(tool.LIST.read_text())


def problems(name: str, text: str) -> list[str]:
    """Return the problems that the committed list finds in a text."""
    return committed_list().problems(tool.mentions({name: text}))


def test_our_texts_name_what_is_there():
    mentioned = tool.mentions(tool.our_texts())
    assert sum(len(each.paths) for each in mentioned) > 300
    assert sum(len(each.identifiers) for each in mentioned) > 300
    assert committed_list().problems(mentioned) == []


def test_our_texts_link_to_the_lines_that_they_say():
    texts = tool.our_texts()
    ranges = tool.line_ranges(texts)
    record = committed_list().ranges
    assert sum(bool(each.row) for each in ranges) >= 100
    assert tool.vllm_lines.problems(ranges, record, tool.VERSION) == []
    assert tool.vllm_lines.unexplained_names(ranges, record, texts) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (POOL.replace("block_pool", "block_pol"), "block_pol.py"),
        (f"[docs]({BLOB}/vllm/v1/core/block_pol.py)", "block_pol.py"),
        (f"| `Pool` | {POOL} `BlockPool.get_new_block` |", "BlockPool.get_new_block "),
        (f"| a | {POOL} |\n| b | the same file, `BlockPol` |", "BlockPol "),
        (f"| a | {POOL} `BlockTable.touch` |", "BlockTable.touch "),
        ("`vllm/v1/core/sched/scheduler.py`, `request_queu.py`", "request_queu.py"),
        ("vLLM's `kv_cache_dtipe`", "kv_cache_dtipe"),
        ("Set `VLLM_LOGING_LEVEL`.", "VLLM_LOGING_LEVEL"),
    ],
)
def test_a_misspelt_name_is_found(text: str, wrong: str):
    (result,) = problems("page.md", f"One line.\n\n{text}\n")
    assert wrong in result
    assert result.startswith(("page.md:3:", "page.md:4:"))


def test_docstrings_and_comments_are_read_and_code_is_not():
    code = '"""In vLLM v0.33.0: `vllm/v1/a.py`."""\n\nx = "`vllm/v1/b.py`"\n\n# `vllm/v1/c.py`,\n# `d`\n'
    assert [problem.split(": ")[0] for problem in problems("module.py", code)] == ["module.py:1", "module.py:5"]
    docstring = 'def f():\n    """Do.\n\n    In vLLM: `vllm/v1/e.py`.\n    """\n'
    (result,) = problems("module.py", docstring)
    assert result.startswith("module.py:4:")


def test_the_list_is_made_from_the_archive(tmp_path: Path):
    files = {"vllm/v1/pool.py": MODULE, "vllm/other.py": "x = 1", "vllm/envs.py": "VLLM_X = 1"}
    files |= {"docs/a.md": "", "docs/b.md": ""}
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"vllm-0.33.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    names = "`BlockPool.free`, `size`, `num_blocks`, `hash_block`, `LIMIT`"
    right = f"| `vllm/v1/pool.py` {names} |\n\n`docs/a.md`, `VLLM_X`\n"
    built = tool.make_list(tool.read_archive(tmp_path / "source.tar.gz"), tool.mentions({"a.md": right}))
    source = tool.read_list(built)
    assert source.paths == {"vllm/v1/pool.py", "vllm/other.py", "vllm/envs.py", "docs/a.md"}
    assert source.problems(tool.mentions({"a.md": right})) == []
    wrong = "`vllm/v1/pool.py` (`BlockPool.hash_block`, `fre`), `docs/b.md`, `VLLM_Y`"
    assert len(source.problems(tool.mentions({"a.md": wrong}))) == 1  # where a path is wrong, only the path is reported
    assert len(source.problems(tool.mentions({"a.md": wrong.replace(", `docs/b.md`", "")}))) == 3
