"""The played pool: a correct pool's books are right in every step, and each kind of wrong pool is
caught.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path
from lessons.mistakes import mutants_of

from minivllm.core.block_pool import BlockPool
from minivllm_lab.checks.mutants import load_mutant
from minivllm_lab.exercise import load
from minivllm_lab.paged_attention.played_pool import MOST_FRAMES, play_pool
from minivllm_simulate.workloads import RequestLengths

LENGTHS = [RequestLengths(5 + 7 * number % 40, 3 + 11 * number % 60) for number in range(9)]


Pool = load(script_path("02")).BlockPool


def mistaken(mistake):
    """Return the pool with one of the mistakes that the exercise's checks must catch."""
    return load_mutant(script_path("02"), mutants_of("02")[mistake]).BlockPool


class TakesBackTwice(Pool):
    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt = max(0, block.ref_cnt - 1)
            if block.ref_cnt == 0:
                self.free.appendleft(block)


class Leaks(Pool):
    def free_blocks(self, blocks):
        super().free_blocks(list(blocks)[:-1])


class LosesBlocks(Pool):
    def free_blocks(self, blocks):
        free = len(self.free)
        super().free_blocks(blocks)
        if len(self.free) > free:
            self.free.popleft()


class Refuses(Pool):
    def get_new_blocks(self, count):
        if self.free[0].block_id > 5:
            raise ValueError("not today")
        return super().get_new_blocks(count)


lengths = st.builds(RequestLengths, st.integers(1, 300), st.integers(1, 300))


@given(st.lists(lengths, min_size=1, max_size=9), st.integers(1, 64), st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=60, deadline=None)
def test_the_engines_pool_is_right_in_every_step(requests, block_size: int, samples: int):
    play = play_pool(requests, block_size, samples, 48, BlockPool)
    assert play.fault == ""
    assert 1 <= len(play.frames) <= MOST_FRAMES
    assert play == play_pool(requests, block_size, samples, 48, Pool), "the lesson's pool allocates the same blocks"
    for frame in play.frames:
        held = {block for table in frame.tables for block in table.blocks}
        assert frame.free == play.num_blocks - 1 - len(held)
        assert all(len(table.blocks) == -(-table.tokens // block_size) for table in frame.tables)
        assert frame.did != "stuck"


def test_the_play_shows_all_that_happens_to_a_pool():
    play = play_pool(LENGTHS, 4, 2, 64, BlockPool)
    assert {frame.did for frame in play.frames} == {"admit", "fork", "copy", "grow", "preempt", "free", "free twice"}
    assert any("preempted: " in frame.caption and "blocks free again" in frame.caption for frame in play.frames)


def test_a_fork_takes_nothing_and_a_copy_replaces_the_shared_block():
    play = play_pool([RequestLengths(6, 8)], 4, 2, 16, BlockPool)
    admitted, forked, copied = play.frames[:3]
    assert admitted.free == forked.free
    assert [table.blocks for table in forked.tables] == [(1, 2), (1, 2)]
    first, second = (table.blocks for table in copied.tables)
    assert first[0] == second[0] == 1, "the full block stays shared"
    assert first[1] != second[1], "who writes into a half full block first, copies it"


@pytest.mark.parametrize(
    ("pool", "words", "clash"),
    [
        (mistaken("does not count a fork"), "is held 2 times, but counted 1 times", "2 samples of request"),
        (TakesBackTwice, "blocks freed twice", "; later block"),
        (Leaks, "lost: counted as held, but in no table", ""),
        (LosesBlocks, "blocks are free, but", ""),
        (mistaken("frees what is shared"), "went to requests", ""),
        (mistaken("hands out the null block"), "block 0, the null block", ""),
        (Refuses, "the pool refuses a valid call: not today", ""),
    ],
)
def test_each_wrong_pool_is_caught(pool, words: str, clash: str):
    play = play_pool(LENGTHS, 4, 2, 64, pool)
    assert words in play.fault
    assert clash in play.fault
    at = next(frame for frame in play.frames if frame.faults)
    assert "✕" in at.caption, "the step says so where it happens"
