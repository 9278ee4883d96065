"""Test the tasks for a room: their links open a state, and the fewest moves are what a search through
all nearer states finds.
"""

import re

import moves
import pytest
from refusals import assert_refused
from repository import ROOT

ROW = re.compile(r"^\| (\d) \| \[[^\]]*\]\((\S+)#(\S+)\) \| (.*?) \| (\w+(?: \d)?): .*? \| (\d+) \|$", re.MULTILINE)
TASKS = ROW.findall((ROOT / "workshop" / "tasks.md").read_text())


def test_every_row_is_a_task():
    rows = [line for line in (ROOT / "workshop" / "tasks.md").read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == len(TASKS) >= 6


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task[0])
def test_the_fewest_moves_are_those_that_a_search_finds(task):
    _, page, link, knobs, goal, fewest = task
    assert f"{link.partition('?')[0]}.show(" in (ROOT / "workshop" / page).read_text()
    assert len(moves.fewest_moves(link, goal, tuple(re.findall(r"`(\w+)`", knobs)))) == int(fewest)


def test_what_is_no_task_is_refused():
    assert_refused("there is no widget", moves.fewest_moves, "nothing", "fine", ())
    assert_refused("is not a goal", moves.fewest_moves, "kv_cache", "challenge 4", ("tp",))
    assert_refused("has no knob nothing", moves.fewest_moves, "kv_cache", "fine", ("nothing",))
    assert_refused("no 1 moves", moves.fewest_moves, "speculative_decoding", "fine", ("k",), 1)
