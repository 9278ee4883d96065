"""Test the report on another release of vLLM: it says what is the same, moved, changed and gone, and
refuses what is no release in one line.
"""

import gzip
import io
import json
import tarfile
from pathlib import Path

import drift
import pytest
from refusals import assert_refuses

POOL = """class BlockPool:
    def take(self, n):
        taken = []
        while self.free:
            block = self.free.pop()
            taken.append(block)
        return taken

    def give(self, block):
        self.free.append(block)


def size():
    return 3
"""
FILE = "vllm/v1/pool.py"
BLOB = f"https://github.com/vllm-project/vllm/blob/v{drift.vllm_names.VERSION}/{FILE}"
ROW = f"| [{{0}}]({BLOB}#L{{1}}) {{2}} | Take | [02](../02_a.md) | | |\n"
PAGE = (
    "| lines | what happens | lesson | ours | ignore for now |\n| --- | --- | --- | --- | --- |\n"
    + ROW.format("3–7", "3-L7", "`taken` to `return taken`")
    + ROW.format("10", "10", "`free.append`")
    + ROW.format("13–14", "13-L14", "`def size`")
)
TEXTS = {
    "lessons/reading/01_pool.md": PAGE,
    "lessons/02_a.md": f"In vLLM: `{FILE}` (`BlockPool.take`, `size`), `vllm/v1/queue.py`, `vllm/lost.py`.\n\n"
    "Set vLLM's `--dry-run` and `--wet-run`.",
}
PINNED = {
    FILE: POOL,
    "vllm/v1/queue.py": "QUEUE = 1\n",
    "vllm/lost.py": "LOST = 1\nFLAGS = '--dry-run', '--wet-run'\n",
    "vllm/envs.py": "",
    "vllm/args.py": "class Args:\n    budget: int = 8192\n    seats: int = 4\n",
}
OTHER = {
    FILE: "import os\n\n" + POOL.replace("self.free.pop()", "self.next()").replace("def size():\n    return 3\n", ""),
    "vllm/v2/queue.py": "QUEUE = 1\n\n\ndef size(): ...\n",
    "vllm/flags.py": "FLAGS = '--dry-run'\n",
    "vllm/envs.py": "",
    "vllm/args.py": "class Args:\n    budget: int = 2048\n    seats: int = 4\n",
}
SIGNATURES = {"vllm/args.py": {"Args": {"budget": {"default": 8192}, "seats": {"default": 4}}}}


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put small texts and a list made of a small release in place of ours."""
    monkeypatch.setattr(drift.vllm_names, "our_texts", lambda: TEXTS)
    monkeypatch.setattr(drift.vllm_names, "ledger", drift.vllm_facts.Ledger)
    monkeypatch.setattr(drift.vllm_facts, "committed_signatures", lambda: SIGNATURES)
    monkeypatch.setattr(drift.vllm_names, "LIST", tmp_path / "list.json")
    names = drift.vllm_names
    facts = drift.vllm_facts.facts_of(names.fact_claims(TEXTS), PINNED, names.ledger())
    ranges = names.line_ranges(TEXTS)
    drift.vllm_names.LIST.write_text(names.make_list(PINNED, names.mentions(TEXTS), ranges, facts, "0"))


def rows(found) -> dict[str, list[int]]:
    return {tally.kind: tally.cells for tally in found if tally.cells[0]}


def test_against_itself_nothing_has_changed(pinned):
    for kind, (total, same, *others) in rows(drift.tallies(PINNED)).items():
        assert (same, others) == (total, [0, 0, 0]), kind


def test_another_release_is_reported_by_kind(pinned):
    found = {tally.kind: tally for tally in drift.tallies(OTHER)}
    assert rows(found.values()) == {
        "paths": [3, 1, 1, 0, 1],
        "identifiers": [2, 1, 1, 0, 0],
        "line ranges": [3, 0, 1, 1, 1],
        "flags": [2, 1, 0, 0, 1],
        "parameters": [2, 1, 0, 1, 0],
    }
    assert found["paths"].moved == ["`vllm/v1/queue.py` is `vllm/v2/queue.py`"]
    assert found["paths"].gone == ["`vllm/lost.py`"]
    assert found["identifiers"].moved == [f"`size` of `{FILE}` is in `vllm/v2/queue.py`"]
    assert found["line ranges"].moved == [f"10-10 is 12-12 of `{FILE}`"]
    assert found["line ranges"].changed == [f"`{FILE}` 3-7 is 5-9"]
    assert found["line ranges"].gone == [f"`{FILE}` 13-14 (`def size`)"]
    assert found["flags"].gone == ["`--wet-run`"]
    assert found["parameters"].changed == ["`vllm/args.py Args.budget` is `2048`, not `8192`"]


def test_a_range_is_found_in_a_file_that_has_moved(pinned):
    found = drift.tallies({"vllm/v2/pool.py": POOL, "vllm/envs.py": ""})
    (tally,) = (each for each in found if each.kind == "line ranges")
    assert tally.cells == [3, 0, 3, 0, 0]
    assert tally.moved[0] == "3-7 is 3-7 of `vllm/v2/pool.py`"


def test_files_are_named_once():
    lines = ["`a.py` 1-2 is 3-4", "`a.py` 5-6 is 7-8", "`b.py` 1-2 is 3-4", "`f` of `c.py`", "`f` of `d.py`"]
    assert drift.shortened(lines) == [lines[0], "5-6 is 7-8", *lines[2:]]


# Decisions


@pytest.fixture
def workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder of two workloads with traces of two steps in place of the recorded ones."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("w1", "w2"):
        (folder / f"{name}.json").write_text("{}")
    traces = {name: [{"step": 0, "free": 3}, {"step": 1, "free": 2}] for name in ("w1", "w2")}
    (folder / "traces.json.gz").write_bytes(gzip.compress(json.dumps(traces).encode()))
    monkeypatch.setattr(drift, "WORKLOADS", (folder,))
    return folder


def python_that(path: Path, prints: str, code: int = 0) -> Path:
    """Return a program that stands in for a Python with vLLM: it prints this."""
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{prints}'\nprintf 'first line\\nno vLLM here\\n' >&2\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_workloads_that_are_decided_otherwise_are_listed(workloads: Path, tmp_path: Path):
    traces = {"w1": [{"step": 0, "free": 3}, {"step": 1, "free": 2}], "w2": [{"step": 0, "free": 3}]}
    python = python_that(tmp_path / "python", json.dumps({"traces": traces}))
    decided, why_not = drift.decisions("0.32.0", python)
    assert why_not == ""
    assert decided.same == 1
    assert decided.changed == ["`w2` from step 1 on (step, free)"]
    assert drift.decided_sentence(decided).startswith("On 1 of 2 recorded workloads")


def test_a_recorder_that_fails_is_one_line(workloads: Path, tmp_path: Path):
    decided, why_not = drift.decisions("0.32.0", python_that(tmp_path / "python", "", code=1))
    assert decided.cells[0] == 0
    assert why_not == "python record.py failed: no vLLM here"
    assert f"**Decisions.** They were not compared: {why_not}.\n" in drift.section("0.32.0", [], decided, why_not)


# The command line


def archive(path: Path, version: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(f"vllm-{version}/vllm/envs.py")
        tar.addfile(info, io.BytesIO(b""))
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["0.32"], "'0.32' is no release of vLLM; say for example VLLM=0.32.0"),
        (["../0.32.0"], "is no release of vLLM"),
        (["0.32.0"], "could not be fetched from 127.0.0.1"),
        (["0.32.0", "--archive", "/nowhere.tar.gz"], "cannot read /nowhere.tar.gz: No such file or directory"),
        (["0.32.0", "--archive", __file__], "cannot read"),
        (["0.32.0", "--archive", "{archive}"], "is not the source archive of vLLM 0.32.0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tmp_path, monkeypatch):
    for name in drift.read_vllm.INDEX_VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    path = str(archive(tmp_path / "source.tar.gz", "0.31.0"))
    assert_refuses(drift, *(each.format(archive=path) for each in arguments), about=words)


def test_the_page_keeps_other_releases_and_has_the_latest_first():
    page = drift.page_with("", "0.9.0", "## vLLM 0.9.0\n\nOld.\n")
    page = drift.page_with(page, "0.32.0", "## vLLM 0.32.0\n\nFirst.\n")
    page = drift.page_with(page, "0.32.0", "## vLLM 0.32.0\n\nSecond.\n")
    assert page == drift.HEAD + "## vLLM 0.32.0\n\nSecond.\n\n## vLLM 0.9.0\n\nOld.\n"


def test_the_committed_page_is_of_this_form():
    page = drift.PAGE.read_text()
    versions = [match[1] for match in drift.SECTION.finditer(page)]
    assert page.startswith(drift.HEAD)
    assert versions
    for match in drift.SECTION.finditer(page):
        assert drift.page_with(page, match[1], match[0].rstrip("\n") + "\n") == page
