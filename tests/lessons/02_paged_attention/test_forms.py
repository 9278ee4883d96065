"""Lesson 02's pool lets the copies of a step be made in one launch, whatever its beams do."""

from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path

from minivllm_lab.exercise import load

lesson = load(script_path("02"))


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.integers(0, 7), min_size=4, max_size=4), max_size=24), st.integers(1, 5))
def test_no_block_of_a_step_is_source_and_target(steps, block_size):
    """Beams fork, parents end and children append, so one launch may copy all pairs together."""
    pool = lesson.BlockPool(400)
    tables = [lesson.BlockTable(pool, block_size)]
    tables[0].append(7)
    for parents in steps:
        children = [tables[parent % len(tables)].fork() for parent in parents]
        for table in tables:
            table.free()
        copies = [pair for child in children for pair in child.append(1)[1]]
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not {source for source, _ in copies} & set(targets)
        tables = children
