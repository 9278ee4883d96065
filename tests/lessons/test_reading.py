"""Test the reading tour of vLLM: its pages keep to one form, their links into both sources hold, and
`make read` shows what they name.
"""

import functools
import hashlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import read_vllm
import words
from e2e.static_server import served
from refusals import assert_refused
from repository import ROOT

TOUR = ROOT / "lessons" / "reading"
STOPS = sorted(TOUR.glob("[0-9][0-9]_*.md"))
RECORD = json.loads((ROOT / "tools" / "vllm_names.json").read_text())
PARTS = ("## Open the file", "## Line by line", "## Three questions", "## Where we differ")
HEADER = "| lines | what happens | lesson | ours | ignore for now |"
by_stop = pytest.mark.parametrize("stop", STOPS, ids=lambda path: path.stem)


def test_there_are_ten_stops_and_the_map_has_them_all():
    assert [path.name[:2] for path in STOPS] == [f"{number:02}" for number in range(1, 11)]
    index = (TOUR / "README.md").read_text()
    assert [f"]({stop.name})" for stop in STOPS if f"]({stop.name})" not in index] == []
    assert "](reports.md)" in index
    assert "](reading/README.md)" in (ROOT / "lessons" / "README.md").read_text()


@by_stop
def test_a_stop_has_its_five_parts_in_order(stop: Path):
    text = stop.read_text()
    assert text.startswith(f"# Stop {int(stop.name[:2])}: ")
    question = text.split("\n\n")[1]
    assert re.match(r"\*\*[A-Z][^*]*\?\*\*", question), "it begins with the question that it answers"
    places = [text.find(f"\n{part}\n") for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)
    assert f"`make read STOP={int(stop.name[:2])}`" in text[places[0] : places[1]]


@by_stop
def test_a_stop_is_read_in_twenty_minutes(stop: Path):
    """The names of the last column are not read but looked up, so code does not count."""
    counted = words.count(words.CODE_SPAN.sub("", stop.read_text()))
    assert 500 <= counted <= 1_000


@by_stop
def test_three_questions_have_their_answers_folded(stop: Path):
    text = stop.read_text()
    part = text[text.index("## Three questions") : text.index("## Where we differ")]
    questions = re.findall(r"<details><summary>(\d)\. (.+?)</summary>\n\n(.+?)\n\n</details>", part, re.DOTALL)
    assert [number for number, _, _ in questions] == ["1", "2", "3"]
    assert part.count("<details>") == 3
    for _, question, answer in questions:
        assert question.endswith("?")
        assert re.search(r"\b(line|lines|Line|Lines)\s+\d+", answer), "an answer says where it stands in the file"


@by_stop
def test_each_row_has_lines_a_lesson_and_our_functions(stop: Path):
    text = stop.read_text()
    table = text[text.index(HEADER) :].split("\n\n")[0].splitlines()[2:]
    rows = read_vllm.rows(stop, RECORD["version"])
    assert len(rows) == len(table) >= 8
    for line in table:
        assert re.search(r"\]\(\.\./\d\d_", line.split(" | ")[2])
    assert sum(bool(row.ours) for row in rows) >= len(rows) - 1
    assert len({(row.theirs.path, row.theirs.first) for row in rows}) == len(rows), "no two begin at one line"


def test_our_functions_are_found_by_name():
    place = read_vllm.our_place("vllm/minivllm/core/scheduler.py", "Scheduler.preempt")
    lines = (ROOT / place.path).read_text().splitlines()
    assert lines[place.first - 1].strip().startswith("def preempt(")
    cell = "[`a`](../../vllm/minivllm/core/policy.py) `victim`, `chunk_limit`, "
    cell += "[`b`](../../vllm/minivllm/core/step.py) `Step`"
    assert [place.name for place in read_vllm.our_places(cell)] == ["victim", "chunk_limit", "Step"]
    assert_refused(
        "has no Scheduler.preemt", read_vllm.our_place, "vllm/minivllm/core/scheduler.py", "Scheduler.preemt"
    )


# make read

VERSION = "9.8.7"
PATH = "vllm/v1/pool.py"
MODULE = "import os\n\n\ndef take(n):\n    free = n\n    while free:\n        free -= 1\n    return free\n"
PAGE = f"""# Stop 1: a pool

{HEADER}
| --- | --- | --- | --- | --- |
| [6–7](https://github.com/vllm-project/vllm/blob/v{VERSION}/{PATH}#L6-L7) `while free` | Take | [02](../02_a.md) | \
[`core/policy.py`](../../vllm/minivllm/core/policy.py) `victim` | |
| [4–8](https://github.com/vllm-project/vllm/blob/v{VERSION}/{PATH}#L4-L8) `def take` | Take | [02](../02_a.md) | | |
"""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Serve a package index with one archive, whose page has HTML links."""
    folder = tmp_path / "index"
    (folder / "simple" / "vllm").mkdir(parents=True)
    (folder / "simple" / "vllm" / "index.html").write_text(
        f'<a href="../../files/vllm-{VERSION}-py3-none-any.whl">wheel</a>\n'
        f'<a data-x="1" href="../../files/vllm-{VERSION}.tar.gz#sha256={SHA256}">source</a>\n'
    )
    (folder / "files").mkdir()
    (folder / "files" / f"vllm-{VERSION}.tar.gz").write_bytes(archive())
    with served(folder) as address:
        yield f"{address}/simple"


@functools.cache
def archive() -> bytes:
    """Return the bytes of the source archive; made once, since gzip writes the time into them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in {PATH: MODULE, "vllm/other.py": "x = 1\n"}.items():
            info = tarfile.TarInfo(f"vllm-{VERSION}/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


SHA256 = hashlib.sha256(archive()).hexdigest()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return `make read` for a tour of one stop; it takes arguments and returns the exit code."""
    (tmp_path / "tour").mkdir()
    (tmp_path / "tour" / "01_pool.md").write_text(PAGE)
    (tmp_path / "record.json").write_text(json.dumps({"version": VERSION, "sha256": SHA256}))
    monkeypatch.setattr(read_vllm, "TOUR", tmp_path / "tour")
    monkeypatch.setattr(read_vllm, "RECORD", tmp_path / "record.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)

    def read(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["read_vllm", *arguments])
        try:
            read_vllm.run(read_vllm.main, read_vllm.parser())
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return read


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
def test_the_source_is_fetched_once_from_the_index_that_is_configured(
    reader, index, tmp_path, monkeypatch, capsys, variable
):
    monkeypatch.setenv(variable, index)
    assert reader("1") == 0
    printed = capsys.readouterr().out
    assert f"{PATH}, lines 6 to 7: while free\n    6      while free:\n    7          free -= 1\n" in printed
    assert "vllm/minivllm/core/policy.py, lines" in printed
    assert printed.index("while free") < printed.index("def victim") < printed.index("def take")
    kept = [path.relative_to(tmp_path / "cache") for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept == [Path("minivllm") / f"vllm-{VERSION}" / PATH], "only the files of the tour are kept"
    monkeypatch.setenv(variable, "http://127.0.0.1:9/simple")  # nothing is fetched again
    assert reader("1", "--row", "2", "--print") == 0
    assert "def victim" not in capsys.readouterr().out


def test_an_index_may_answer_in_json(tmp_path: Path):
    page = json.dumps({"files": [{"url": "other.whl"}, {"url": f"../../files/vllm-{VERSION}.tar.gz"}]})
    kind = "application/vnd.pypi.simple.v1+json"
    address = read_vllm.archive_address(page, "https://a.example/simple/vllm/", kind, VERSION)
    assert address == f"https://a.example/files/vllm-{VERSION}.tar.gz"
    assert_refused(
        "the package index a.example has no vllm-1.2.3.tar.gz",
        read_vllm.archive_address, page, "https://a.example/simple/vllm/", kind, "1.2.3",
    )  # fmt: skip
    with_hash = json.dumps({"files": [{"url": "a.whl", "hashes": {"sha256": "0a"}}, {"url": "b.whl"}]})
    assert read_vllm.file_links(with_hash, "application/json") == ["a.whl#sha256=0a", "b.whl"]


def test_pips_configuration_names_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.example/simple\n")
    assert read_vllm.index_url({"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}) == "https://mirror.example/simple"
    assert read_vllm.index_url({"PIP_INDEX_URL": "a", "UV_INDEX_URL": "b"}) == "b"


def one_line(capsys: pytest.CaptureFixture) -> str:
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    return line


OTHER = "0" * 64


@pytest.mark.parametrize(
    ("files", "old", "new", "about"),
    [
        (["index/simple/vllm/index.html"], SHA256, OTHER, f".tar.gz has the SHA-256 {SHA256}, expected {OTHER}"),
        (["record.json"], SHA256, OTHER, f"SHA-256 {SHA256}, expected {OTHER}"),
        (["record.json", "tour/01_pool.md"], VERSION, "1.2.3", "the package index 127.0.0.1 has no vllm-1.2.3.tar.gz"),
    ],
    ids=["index", "record", "version"],  # the archive's SHA-256 differs from worker to worker
)
def test_an_archive_that_is_not_the_release_is_refused(
    reader, index, tmp_path, monkeypatch, capsys, files, old, new, about
):
    monkeypatch.setenv("PIP_INDEX_URL", index)
    for path in (tmp_path / file for file in files):
        path.write_text(path.read_text().replace(old, new))
    assert reader("1") == 2
    assert about in one_line(capsys)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "nothing of it is kept"


def test_without_a_network_it_says_what_to_do(reader, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert reader("1") == 2
    line = one_line(capsys)
    assert "could not be fetched from 127.0.0.1" in line
    assert "--archive FILE" in line
    (tmp_path / "source.tar.gz").write_bytes(archive())
    assert reader("1", "--archive", str(tmp_path / "source.tar.gz")) == 0
    assert "while free" in capsys.readouterr().out
    assert (tmp_path / "source.tar.gz").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["7"], "there is no stop 7: the tour has stops 1 to 1"),
        (["0"], "must be at least 1"),
        (["one"], "'one' is not a whole number"),
        (["1", "--row", "3"], "stop 1 has rows 1 to 2, no row 3"),
        (["1", "--archive", "/nowhere.tar.gz"], "cannot read /nowhere.tar.gz: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(reader, capsys, arguments, words):
    assert reader(*arguments) == 2
    assert words in one_line(capsys)


def test_a_pager_opens_the_file_at_the_line_with_ours_behind_it(tmp_path, reader, monkeypatch, capsys):
    (tmp_path / "source.tar.gz").write_bytes(archive())
    assert reader("1", "--archive", str(tmp_path / "source.tar.gz")) == 0
    folder = tmp_path / "cache" / "minivllm" / f"vllm-{VERSION}"
    started: list[list[str]] = []
    monkeypatch.setattr(read_vllm.subprocess, "run", lambda command, **_more: started.append(command))
    chosen = read_vllm.rows(tmp_path / "tour" / "01_pool.md", VERSION)
    read_vllm.page_rows(chosen, folder, ["less", "-N"])
    read_vllm.page_rows(chosen, folder, ["/usr/bin/batcat"])
    ours = str(ROOT / "vllm" / "minivllm" / "core" / "policy.py")
    assert started[0] == ["less", "-N", "+6", str(folder / PATH), ours]
    assert started[1] == ["/usr/bin/batcat", str(folder / PATH), ours]
    assert f"vLLM  {PATH}, lines 6 to 7: while free\nours  vllm/minivllm/core/policy.py" in capsys.readouterr().out
