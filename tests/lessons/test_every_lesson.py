"""Test that every exercise's checks pass on the lesson's script, and fail on the stub; that the engine
runs with the script's parts; that the text does not answer the exercise beforehand; and that the
scripts refuse bad input.
"""

import doctest

import pytest
from lessons.harness import REPOSITORY, assert_refuses, results_of, script_path

from minivllm.config import NO_PARTS
from minivllm_lab import exercise
from minivllm_lab.checks.plugged import rows_of, serve
from minivllm_lab.exercise import exercise_path, load, plug_of
from minivllm_lab.marks import lesson_page

NUMBERS = sorted(path.name[:2] for path in (REPOSITORY / "lessons" / "exercises").glob("[0-9][0-9]_*.py"))


@pytest.mark.interpreted
@pytest.mark.parametrize("number", NUMBERS)
def test_the_script_passes_every_check(number):
    assert [result.problem for result in results_of(script_path(number), number) if not result.passed] == []


@pytest.mark.interpreted
@pytest.mark.parametrize("number", NUMBERS)
def test_the_stub_fails_every_check(number):
    results = results_of(exercise_path(number), number)
    assert len(results) >= 5
    assert all(result.problem.startswith("not written yet") for result in results)


@pytest.mark.parametrize("number", NUMBERS[1:])  # lesson 01's example leaves out the cache that it is called with
def test_the_stubs_examples_are_what_the_script_gives(number):
    stub, script = load(exercise_path(number)), vars(load(script_path(number)))
    for example in doctest.DocTestFinder().find(stub, globs=script):
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_the_engine_does_the_same_with_the_scripts_parts(number):
    """Tokens, steps and counts are the same, except what a server or a pair of engines counts for
    each side.
    """
    plugged = plug_of(number)(load(script_path(number)))
    ours, yours = ((plugged.serve or serve)(plugged, parts) for parts in (NO_PARTS, plugged.parts))
    assert (yours.token_ids, yours.texts, yours.equal) == (ours.token_ids, ours.texts, ours.equal)
    assert yours.preemptions > 0 or number not in ("04", "11"), "their pools were to be too small"
    if plugged.serve is None:
        counted = [{name: row for name, row in rows_of(run).items() if "second" not in name} for run in (ours, yours)]
        assert counted[0] == counted[1]


ANSWERS = {"06": ("async def until_disconnected",), "07": ("np.argmax",), "09": ("torch.einsum", "rank //")}
"""Pieces of an answer that would give it away."""


@pytest.mark.parametrize("number", NUMBERS)
def test_no_answer_of_the_exercise_stands_before_it(number):
    """Before *Build it*, a lesson has no kernel, and none of the functions that are to be written."""
    before = lesson_page(REPOSITORY / "lessons", number).read_text().partition("## Build it")[0]
    written = [f"{kind} {name}" for name in exercise._to_write(number) for kind in ("def", "class")]
    assert len(written) > 4
    assert [words for words in ("@triton.jit", *written, *ANSWERS.get(number, ())) if words in before] == []


@pytest.mark.parametrize(
    ("number", "flags", "about"),
    [
        ("01", "--max-model-len 40000", "set max_model_len to"),
        ("01", "--gpu Z80", "known: T4"),
        ("01", "--serve nobody", "no known shape"),
        ("02", "--block-size 4096", "--block-size must be at most 2,048"),
        ("03", "--block-q 4 --block-k 4", "at least 64 scores"),
        ("03", "--head-dim 5000", "at most 1,024"),
        ("03", "--row /proc/nowhere/row.json", "cannot write"),
        ("04", "--requests 3", "--requests: must be from 12 to 4096"),
        ("04", "--model /no/such/model", "no model directory"),
        ("05", "--group 7", "invalid choice: 7"),
        ("06", "--slo-tpot soon", "invalid float value"),
        ("07", "--drafts 0", "--drafts: must be from 1 to 16"),
        ("07", "--drafts 17", "--drafts: must be from 1 to 16"),
        ("07", "--draft-model nowhere", "nowhere"),
        ("07", "--model nowhere", "nowhere"),
        ("08", "--prompt 63", "--prompt: must be from 64 to 1900"),
        ("09", "--heads 0", "--heads: must be from 1 to 256"),
        ("09", "--head-dim 20", "--head-dim is 20; it must be a multiple of 8"),
        ("09", "--context 0", "--context: must be from 1 to 32768"),
        ("10", "--prompt 63", "--prompt: must be from 64 to 1900"),
        ("11", "--blocks 10", "--blocks: must be from 11 to 200"),
        ("11", "--blocks many", "--blocks: 'many' is not a whole number"),
        ("12", "--adapters 7", "--adapters: must be from 8 to 5000"),
        ("12", "--skew -1", "--skew: must be a number from 0 to 3"),
    ],
)
def test_bad_input_is_refused_in_one_line(number, flags, about):
    assert_refuses(load(script_path(number)), *flags.split(), about=about)
