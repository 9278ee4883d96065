"""Test the schedules: clocks and sums, and that each part takes the minutes that its lesson says."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from repository import ROOT

TEXT = (ROOT / "workshop" / "schedules.md").read_text()
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d*) ?\| (.*?) \|", re.MULTILINE)
DAYS = {
    heading: ROW.findall(part)
    for heading, part in re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    if ROW.search(part)
}
MINUTES = {
    "Half a day: 3.5 hours": 210,
    "One day: 7 hours": 420,
    "The first day": 420,
    "The second day": 420,
    "A third day: 7 hours": 420,
}
PART = re.compile(r"(\d\d) (talk|exercise)(?:: (.+))?")


def lesson(number: str) -> Path:
    (path,) = (ROOT / "lessons").glob(f"{number}_*.md")
    return path


def minutes_of(number: str, kind: str, part: str | None) -> int:
    """Return the minutes of a lesson's talk or exercise, by its header, or of a part of it, by the guide's plan."""
    header = re.search(r"\*\*Time:\*\* (\d+) minutes of talk, (\d+) of exercise", lesson(number).read_text())
    assert header
    if part is None:
        return int(header[1] if kind == "talk" else header[2])
    plan = (ROOT / "workshop" / "guides" / lesson(number).name).read_text().split("\n## Plan\n")[1].split("\n## ")[0]
    half = plan.split("| **talk** |")[kind == "exercise"]
    found = re.findall(rf"^\| (\d+) \| {re.escape(part)} \|", half, re.MULTILINE)
    assert len(found) == 1, f"the plan of lesson {number} has no part {part!r} in its {kind}"
    return int(found[0])


@pytest.mark.parametrize("day", MINUTES)
def test_the_clock_goes_on_and_the_minutes_add_up(day):
    rows, total = DAYS[day], 0
    for (hours, minutes, lasts, what), (next_hours, next_minutes, *_) in pairwise(rows):
        passed = 60 * (int(next_hours) - int(hours)) + int(next_minutes) - int(minutes)
        assert passed == int(lasts), f"{day}, {hours}:{minutes} {what}"
        total += passed if what != "lunch" else 0
    assert total == MINUTES[day]
    assert rows[-1][3] == "end"


@pytest.mark.parametrize("day", MINUTES)
def test_a_part_takes_the_minutes_that_its_lesson_says(day):
    parts = [(int(lasts), PART.fullmatch(what)) for _, _, lasts, what in DAYS[day] if re.match(r"\d\d ", what)]
    assert len(parts) >= 3
    for lasts, part in parts:
        assert part
        assert lasts == minutes_of(*part.groups()), part[0]


@pytest.mark.parametrize("day", MINUTES)
def test_there_is_a_break_after_at_most_two_hours(day):
    since = 0
    for _, _, lasts, what in DAYS[day][:-1]:
        since = 0 if what in ("break", "lunch") else since + int(lasts)
        assert since <= 120, f"{day}: {what}"


def test_every_schedule_is_tested_and_says_what_to_leave_out():
    assert DAYS.keys() == MINUTES.keys()
    for heading in ("Half a day: 3.5 hours", "One day: 7 hours", "Two days: 14 hours", "A third day: 7 hours"):
        part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        assert re.search(r"^\*\*Late[^*]*\?\*\*", part, re.MULTILINE), heading


def test_every_talk_and_every_exercise_stands_in_a_schedule():
    """Lesson by lesson, of the three days that go on from each other, so a part of an exercise is enough."""
    held = {(part[1], part[2]) for day in list(MINUTES)[2:] for *_, what in DAYS[day] if (part := PART.fullmatch(what))}
    assert held == {(f"{number:02}", kind) for number in range(1, 13) for kind in ("talk", "exercise")}


def test_what_is_left_out_of_a_talk_has_the_minutes_of_its_part():
    named = re.findall(r"(\d\d)'s \*([^*]+)\* \((\d+)\)", TEXT)
    assert named
    for number, part, minutes in named:
        assert minutes_of(number, "talk", part) == int(minutes), part


def test_lessons_come_after_those_that_they_need():
    first, second, third = list(MINUTES)[2:]
    for day, before in (*((day, []) for day in list(MINUTES)[:2]), (second, [first]), (third, [first, second])):
        taught: list[str] = []
        for _, _, _, what in [row for name in (*before, day) for row in DAYS[name]]:
            if part := PART.fullmatch(what):
                needs = re.search(r"\*\*You need:\*\* ([^.]*)\.", lesson(part[1]).read_text())
                assert needs
                core = needs[1].split(";")[0]
                needed = re.findall(r"\b\d\d\b", core)
                if re.search(r"\d\d to \d\d", core):
                    needed = [f"{number:02}" for number in range(int(needed[0]), int(needed[1]) + 1)]
                taught.append(part[1])
                missing = {number for number in needed if number not in taught} - {"03"}  # for kernels
                assert not missing, f"{day}: {part[1]} needs {missing}"
