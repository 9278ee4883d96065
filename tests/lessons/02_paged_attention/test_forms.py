"""Lesson 02's pool is the engine's: the same operations give the same blocks, counts and free
order.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path

from minivllm.core.block_pool import BlockPool
from minivllm.errors import MinivllmError
from minivllm_lab.exercise import load
from minivllm_lab.paged_attention.allocators import TablesOnDemand
from minivllm_lab.paged_attention.memory_replay import replay
from minivllm_simulate.workloads import workload

lesson = load(script_path("02"))

acts = st.lists(
    st.tuples(st.sampled_from(("append", "append", "new", "fork", "free")), st.integers(0, 99), st.integers(0, 40)),
    max_size=60,
)


def state_of(pool):
    """Return the reference counts by block, and the free blocks in the order in which they will be
    taken.
    """
    free = (
        pool.free
        if isinstance(pool, lesson.BlockPool)
        else pool.free_block_queue.first(pool.free_block_queue.num_free_blocks)
    )
    return [block.ref_cnt for block in pool.blocks], [block.block_id for block in free]


def act_on(tables, pool, block_size, kind, which, tokens):
    """Perform one operation; return its result."""
    if kind == "new" or not tables:
        tables.append(lesson.BlockTable(pool, block_size))
        return None
    table = tables[which % len(tables)]
    if kind == "fork":
        tables.append(table.fork())
    elif kind == "free":
        tables.remove(table)
        table.free()
    else:
        try:
            return table.append(tokens)
        except MinivllmError as error:
            return str(error)
    return None


@settings(deadline=None, max_examples=80)
@given(acts, st.integers(2, 24), st.sampled_from((1, 3, 16)), st.booleans())
def test_the_two_pools_cannot_be_told_apart(operations, blocks, block_size, caching):
    pools = lesson.BlockPool(blocks), BlockPool(blocks, enable_caching=caching)
    tables = [], []
    for operation in operations:
        said = [act_on(mine, pool, block_size, *operation) for mine, pool in zip(tables, pools, strict=True)]
        assert said[0] == said[1]
        assert state_of(pools[0]) == state_of(pools[1])
        assert [table.block_ids() for table in tables[0]] == [table.block_ids() for table in tables[1]]


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


def test_the_replay_is_the_same_on_the_engines_pool():
    requests = [request for request in workload("sharegpt").sample(3000) if request.total <= 2048]
    pool = BlockPool(1 + 6000 // 16)
    engine = TablesOnDemand(6000, 16, lambda: lesson.BlockTable(pool, 16))
    assert replay(engine, requests, 500) == replay(lesson.paged(6000, 16), requests, 500)
