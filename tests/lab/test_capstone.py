"""The capstone: the parts of all solved exercises serve together, and any difference from ours is
reported.
"""

import pytest
from lessons.harness import script_path

from minivllm_lab.capstone import NUMBERS, SERVERS, difference_of, parts_of, serve_all
from minivllm_lab.engines.over_http import Answer, Load
from minivllm_lab.exercise import load


@pytest.fixture(scope="module")
def solutions():
    return {number: load(script_path(number)) for number in NUMBERS}


def test_every_exercise_is_in_a_server(solutions):
    assert {number for server in SERVERS for number in server.exercises} == set(NUMBERS)
    front_end = ["output_collector", "stop_strings", "until_disconnected"]
    named = [parts_of(server, solutions).names for server in SERVERS]
    assert named[0] == ["schedule", "block_pool", "attention", *front_end]
    assert named[1] == ["attention", *front_end]
    drafts, caps = ["draft_proposer", "rejection_sample"], ["chunk_limit", "running_tokens", "admitted_tokens"]
    assert named[2] == [*caps, "hash_block_tokens", "attention", *drafts, *front_end]
    assert named[3] == ["schedule", "find_prefix", "attention", *drafts, *front_end]
    assert named[4] == ["schedule", "may_admit", "lora_slots", *front_end]
    assert parts_of(SERVERS[0], {"04": solutions["04"]}).names == ["schedule"], "ours where yours is not solved"


def test_the_solutions_serve_together(solutions, capsys):
    assert serve_all(solutions)
    shown = capsys.readouterr().out
    assert shown.count("the same") == len(SERVERS)


def test_what_differs_is_told():
    def load_of(text="a", aborted=1, free=9):
        return Load([Answer(text, [1])], aborted, free, 9)

    assert difference_of(load_of(), load_of()) is None
    assert difference_of(load_of("b"), load_of()) == "request 0: 'b', but ours 'a'"
    assert difference_of(load_of(aborted=0), load_of()) == "0 requests aborted, but 1 by ours"
    assert difference_of(load_of(free=7), load_of()) == "2 blocks are still held"
