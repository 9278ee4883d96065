"""The bug museum: each defect shows, hides well, and can be found; misused commands give a one-line
error.
"""

import contextlib
import difflib
import functools
import importlib
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
from refusals import assert_refused, assert_refuses

from minivllm_lab.checks.checking import module_from
from minivllm_lab.museum import copies, desk, workloads
from minivllm_lab.museum.exhibits import COLLECTION, ENGINE, NUM_HINTS, Exhibit, exhibits, what_happens_in
from minivllm_lab.tables import console

ALL = list(exhibits().values())
INTERPRETED_WORKLOADS = ("triton_kernel", "groups_on_triton")
CONCURRENT_WORKLOADS = ("slow_reader", "reader_leaves", "ahead_under_pressure")


@functools.cache
def on_the_sound_engine(workload: str) -> dict:
    return workloads.observe(workload)


@contextlib.contextmanager
def built_in(exhibit: Exhibit) -> Iterator[None]:
    """Build the defect into this process's engine, which is faster than starting a process for
    each.
    """
    module = importlib.import_module("minivllm." + exhibit.file.removesuffix(".py").replace("/", "."))
    function = functools.reduce(lambda place, name: vars(place)[name], exhibit.function.split("."), module)
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):  # others may have imported it: it changes in place
        sound = function.__code__
        function.__code__ = compiled_function(exhibit)
        try:
            yield
        finally:
            function.__code__ = sound
    else:  # a Triton kernel
        broken = module_from(exhibit.broken_source(), ENGINE / "broken.py")
        with mock.patch.object(module, exhibit.function, getattr(broken, exhibit.function)):
            yield


def compiled_function(exhibit: Exhibit) -> types.CodeType:
    code = compile(exhibit.broken_source(), exhibit.file, "exec", dont_inherit=True)
    for name in exhibit.function.split("."):
        (code,) = [part for part in code.co_consts if isinstance(part, types.CodeType) and part.co_name == name]
    return code


# ---- the exhibits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exhibit",
    [pytest.param(entry, marks=[pytest.mark.interpreted] * (entry.workload in INTERPRETED_WORKLOADS)) for entry in ALL],
    ids=[f"{entry.number:02d}" for entry in ALL],
)
def test_the_symptom_shows_on_the_broken_engine_only(exhibit):
    sound = on_the_sound_engine(exhibit.workload)
    assert "raised" not in sound
    with built_in(exhibit):
        assert workloads.observe(exhibit.workload) != sound
    if exhibit.workload in CONCURRENT_WORKLOADS:
        assert workloads.observe(exhibit.workload) == sound, "a difference must be the defect's"


def test_the_defects_hide_well():
    for entry in ALL:
        before, after = entry.sound_source().splitlines(), entry.broken_source().splitlines()
        changes = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
        kinds = Counter(line[0] for line in changes)
        assert 1 <= max(kinds.values()) <= 3, entry.title
        assert len(after) <= len(before), entry.title
        comments = [line.partition("#")[2] for line in changes if line[0] == "+" and "#" in line]
        assert all(any(line.endswith(comment) for line in before) for comment in comments), entry.title


def test_broken_files_are_formatted_as_the_engine_is(tmp_path):
    for entry in ALL:
        (tmp_path / f"{entry.number:02d}.py").write_text(entry.broken_source())
    settings = ["--config", str(COLLECTION.parents[2] / "pyproject.toml")]
    command = [sys.executable, "-m", "ruff", "format", "--check", *settings, str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_hints_come_nearer_step_by_step():
    for entry in ALL:
        *vague, last = entry.hints
        assert len(entry.hints) == NUM_HINTS
        assert entry.function in last
        assert not any(entry.function in hint for hint in (entry.title, entry.symptom, *vague))
        assert not any(entry.old in hint or (entry.new and entry.new in hint) for hint in entry.hints)
        assert entry.file not in entry.hints[0]
        assert entry.why


def test_the_collection():
    assert [entry.number for entry in ALL] == list(range(1, len(ALL) + 1))
    assert len(ALL) >= 22
    assert [entry.lesson for entry in ALL] == sorted(entry.lesson for entry in ALL)
    assert {entry.lesson for entry in ALL} == set(range(1, 13))
    assert (
        len({entry.title for entry in ALL})
        == len({(entry.file, entry.function, entry.old) for entry in ALL})
        == len(ALL)
    )
    for entry in ALL:
        assert what_happens_in(entry.workload).endswith(".")


def test_the_page_lists_the_symptoms():
    page = (COLLECTION.parent / "README.md").read_text()
    for entry in ALL:
        assert f"| {entry.number} | {entry.lesson:02d} | {entry.title} | {entry.symptom} |" in page
    assert page.count("\n| ") == len(ALL) + 2


# ---- the commands --------------------------------------------------------------------------------


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "ROOMS", tmp_path / "bugs")
    return tmp_path / "bugs"


def said(*arguments: str) -> str:
    with console.capture() as capture:
        desk.main(desk.parser().parse_args(arguments))
    return capture.get()


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_an_exhibit_from_its_symptom_to_its_end(rooms, monkeypatch):
    """The copy of exhibit 10 in its own process shows what this process sees with the defect built
    in.
    """
    few = {number: exhibits()[number] for number in (10, 17)}
    names = sorted(exhibit.workload for exhibit in few.values())
    sound = {name: on_the_sound_engine(name) for name in names}
    with built_in(few[10]):
        broken = {name: workloads.observe(name) for name in names}
    assert [name for name in names if broken[name] != sound[name]] == [few[10].workload]
    monkeypatch.setattr(desk, "exhibits", lambda: few)
    copy = rooms / "10" / "minivllm" / "core" / "block_pool.py"

    def observe_here(asked, *where):
        assert where == (None, rooms / "10")
        answers = broken if copy.read_text() == few[10].broken_source() else sound
        return [{name: seen[name] for name in asked} for seen in (sound, answers)]

    monkeypatch.setattr(desk, "observe", observe_here)
    shown = said("--bug", "10")
    assert "-12.5%" in shown
    assert "minivllm" in shown
    assert not (rooms / "10" / "minivllm_lab").exists()
    assert copies.observe(names, rooms / "10") == [broken]
    assert "0 of" in said()
    copy.write_text(few[10].sound_source())
    assert "Repaired" in said("--bug", "10", "--try")
    assert "1 of 2 solved" in said()


@pytest.mark.parametrize(
    ("workload", "words"),
    [(exhibits()[10].workload, "The symptom is still there"), ("burst", "something else is wrong: burst")],
)
def test_a_repair_without_effect_or_that_breaks_something_else_is_none(rooms, monkeypatch, workload, words):
    copies.set_up(exhibits()[10])
    sound = {exhibit.workload: {"text": "right"} for exhibit in ALL}
    monkeypatch.setattr(desk, "observe", lambda *_: [sound, {**sound, workload: {"text": "wrong"}}])
    with pytest.raises(SystemExit) as ended, console.capture() as capture:
        desk.main(desk.parser().parse_args(["--bug", "10", "--try"]))
    assert ended.value.code == 1
    assert words in in_one_line(capture.get())
    assert copies.solved() == {}


def test_an_engine_that_does_not_start_is_a_symptom_and_the_sound_one_always_starts(rooms, monkeypatch):
    entry = exhibits()[10]
    copies.set_up(entry)
    copy = copies.room_of(entry) / "minivllm"
    (copy / "core" / "block_pool.py").write_text("def broken(:\n")
    (copies.room_of(entry) / "torch.py").write_text("def set_num_threads(number): ...\n")  # it takes seconds to import
    (seen,) = copies.observe([entry.workload], copies.room_of(entry))
    assert "SyntaxError" in seen[entry.workload]["the engine as a whole"]
    monkeypatch.setattr(copies, "ENGINE", copy)
    assert_refused(r"cannot compare with the sound engine: .*SyntaxError", copies.observe, [entry.workload], None)


def test_a_copy_that_the_learner_has_changed_is_left_alone(rooms):
    entry = exhibits()[10]
    assert copies.set_up(entry)
    assert copies.set_up(entry)
    copy = copies.room_of(entry) / "minivllm" / entry.file
    copy.write_text(copy.read_text() + "\n# mine\n")
    assert not copies.set_up(entry)
    assert "# mine" in copy.read_text()
    shutil.rmtree(copies.room_of(entry))
    assert copies.set_up(entry)


def test_a_guess_is_judged_by_its_distance():
    for entry in ALL:
        line, file = entry.lines()[0], entry.file
        assert entry.judge(file, line) == entry.judge(file, line + 1) == "found"
        assert entry.judge(file, 1) == "file"
        assert entry.judge("core/limits.py", line) == "cold"


def test_a_guess_in_the_right_function_is_warm(rooms):
    entry = exhibits()[17]
    warm = next(
        line for line in range(entry.lines()[0] - 20, entry.lines()[0]) if entry.judge(entry.file, line) == "function"
    )
    assert "Warm" in said("--bug", "17", "--line", f"{entry.file}:{warm}")
    assert "Cold" in said("--bug", "17", "--line", "out/bugs/17/minivllm/core/stop.py:1")
    assert "Lukewarm" in said("--bug", "17", "--line", "core/scheduler.py:1")
    assert copies.solved() == {}
    assert entry.why.split()[0] in said("--bug", "17", "--line", f"vllm/minivllm/{entry.file}:{entry.lines()[0]}")
    assert copies.solved() == {"17": "line"}


@pytest.mark.usefixtures("rooms")
@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--bug", "99"), "there is no exhibit '99'"),
        (("--bug", "0"), "there is no exhibit '0'"),
        (("--bug", "x"), "there is no exhibit 'x'"),
        (("--bug", "²"), "there is no exhibit"),
        (("--hint", "1"), "which exhibit?"),
        (("--bug", "1", "--hint", "4"), "there is no hint '4'"),
        (("--bug", "1", "--line", "core"), "is not a line"),
        (("--bug", "1", "--line", "core/nowhere.py:3"), "not a file of the engine"),
        (("--bug", "1", "--line", "../../tools/links.py:3"), "not a file of the engine"),
        (("--bug", "1", "--line", "core/stop.py:0"), "has lines 1 to"),
        (("--bug", "1", "--line", f"core/stop.py:{10**30}"), "has lines 1 to"),
        (("--bug", "1", "--try"), "is not there yet"),
        (("--bug", "1", "--hint", "1", "--try"), "one at a time"),
        (("--bugs",), "unrecognized"),
    ],
)
def test_bad_input_gets_one_line(arguments, about):
    assert_refuses(desk, *arguments, about=about)


def test_every_hint_can_be_read():
    for which in ("1", "2", "3"):
        assert in_one_line(exhibits()[6].hints[int(which) - 1]) in in_one_line(said("--bug", "6", "--hint", which))
