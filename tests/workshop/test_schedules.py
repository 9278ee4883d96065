"""Test the schedules: clocks and sums, and that each part takes the minutes that its lesson says."""

import re
from itertools import pairwise

import pytest
from repository import LESSONS, ROOT, lesson, minutes

TEXT = (ROOT / "workshop" / "schedules.md").read_text()
ROW = re.compile(r"^\| (\d+):(\d\d) \| (\d*) ?\| (.*?) \|", re.MULTILINE)
PARTS = re.findall(r"^##+ (.*?)\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
DAYS = {heading: ROW.findall(part) for heading, part in PARTS if ROW.search(part)}
MINUTES = {
    "Half a day: 3.5 hours": 210, "One day: 7 hours": 420, "The first day": 420, "The second day": 420,
    "A third day: 7 hours": 420,
}  # fmt: skip
PART = re.compile(r"(\d\d) (talk|exercise)(?:: (.+))?")


def minutes_of(number: str, kind: str, part: str | None) -> int:
    """Return the minutes of a lesson's talk or exercise, by its header, or of a part of it, by the guide's plan."""
    stem = LESSONS[int(number) - 1]
    if part is None:
        return minutes(stem)[kind == "exercise"]
    plan = (ROOT / "workshop" / "guides" / f"{stem}.md").read_text().split("\n## Plan\n")[1].split("\n## ")[0]
    half = plan.split("| **talk** |")[kind == "exercise"]
    found = re.findall(rf"^\| (\d+) \| {re.escape(part)} \|", half, re.MULTILINE)
    assert len(found) == 1, f"the plan of lesson {number} has no part {part!r} in its {kind}"
    return int(found[0])


@pytest.mark.parametrize("day", MINUTES)
def test_the_clock_goes_on_the_minutes_add_up_and_there_is_a_break_after_at_most_two_hours(day):
    rows, total, since = DAYS[day], 0, 0
    for (hour, minute, lasts, what), (next_hour, next_minute, *_) in pairwise(rows):
        passed = 60 * (int(next_hour) - int(hour)) + int(next_minute) - int(minute)
        assert passed == int(lasts), f"{day}, {hour}:{minute} {what}"
        total += passed if what != "lunch" else 0
        since = 0 if what in ("break", "lunch") else since + passed
        assert since <= 120, f"{day}: {what}"
    assert total == MINUTES[day]
    assert rows[-1][3] == "end"


@pytest.mark.parametrize("day", MINUTES)
def test_a_part_takes_the_minutes_that_its_lesson_says(day):
    parts = [(int(lasts), PART.fullmatch(what)) for _, _, lasts, what in DAYS[day] if re.match(r"\d\d ", what)]
    assert len(parts) >= 3
    for lasts, part in parts:
        assert part
        assert lasts == minutes_of(*part.groups()), part[0]


def test_every_schedule_is_tested_and_says_what_to_leave_out():
    assert DAYS.keys() == MINUTES.keys()
    for heading in ("Half a day: 3.5 hours", "One day: 7 hours", "Two days: 14 hours", "A third day: 7 hours"):
        part = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        assert re.search(r"^\*\*Late[^*]*\?\*\*", part, re.MULTILINE), heading
    named = re.findall(r"(\d\d)'s \*([^*]+)\* \((\d+)\)", TEXT)
    assert named
    for number, part, lasts in named:
        assert minutes_of(number, "talk", part) == int(lasts), part


def test_every_talk_and_every_exercise_stands_in_a_schedule():
    """Lesson by lesson, of the three days that go on from each other, so a part of an exercise is enough."""
    held = {(part[1], part[2]) for day in list(MINUTES)[2:] for *_, what in DAYS[day] if (part := PART.fullmatch(what))}
    assert held == {(stem[:2], kind) for stem in LESSONS for kind in ("talk", "exercise")}


def needed_by(number: str) -> set[str]:
    """Return the lessons that a lesson's header names: `01, 04` or `01 to 04`, before any semicolon."""
    needs = re.search(r"\*\*You need:\*\* ([^.;]*)", lesson(LESSONS[int(number) - 1]))
    assert needs
    named = re.findall(r"\b\d\d\b", needs[1])
    is_range = re.search(r"\d\d to \d\d", needs[1])
    return {f"{each:02}" for each in range(int(named[0]), int(named[1]) + 1)} if is_range else {*named}


def test_lessons_come_after_those_that_they_need():
    half, one, first, second, third = MINUTES
    for days in ([half], [one], [first, second, third]):
        taught = {"03"}  # for kernels
        for part in filter(None, (PART.fullmatch(what) for day in days for *_, what in DAYS[day])):
            taught.add(part[1])
            assert needed_by(part[1]) <= taught, f"{days[-1]}: {part[1]}"
