"""Test that, for any two block sizes, the pieces that are moved belong to the same tokens on both
sides.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.kv_connector.nixl.pieces import piece_indices, regions_in_pieces, tokens_of_a_piece


@given(st.data())
def test_pieces_move_the_tokens_and_nothing_else(data):
    mine, theirs = (data.draw(st.sampled_from((1, 2, 3, 4, 6, 8, 16))) for _ in range(2))
    total = data.draw(st.integers(1, 60))
    start = data.draw(st.integers(0, (total - 1) // mine)) * mine
    cells = np.random.default_rng(0)
    tables = {}
    for size in (mine, theirs):
        tables[size] = cells.permutation(-(-total // size) + 3)[: -(-total // size)]
    num_blocks = {size: -(-total // size) + 3 for size in (mine, theirs)}
    step = tokens_of_a_piece(mine, theirs)
    assert mine % step == theirs % step == 0
    tokens = range(start, total, step)
    into = piece_indices(tables[mine][start // mine :], mine, start, tokens, num_blocks[mine], 2)
    pieces = piece_indices(tables[theirs], theirs, 0, tokens, num_blocks[theirs], 2)
    source = np.arange(2 * num_blocks[theirs] * theirs).reshape(-1, step)
    target = np.full((2 * num_blocks[mine] * mine // step, step), -1)
    target[into] = source[pieces]
    source, target = source.reshape(2, -1), target.reshape(2, -1)

    def slots(size, position):
        return tables[size][position // size] * size + position % size

    for region in (0, 1):
        moved = np.arange(start, total)
        assert (target[region][slots(mine, moved)] == source[region][slots(theirs, moved)]).all()
    assert (target >= 0).sum() == 2 * len(tokens) * step


def test_two_equal_block_sizes_move_whole_blocks():
    assert piece_indices([5, 2], 4, 4, range(4, 11, 4), 8, 2).tolist() == [5, 2, 13, 10]


@pytest.mark.parametrize(("mine", "theirs", "expected"), [(16, 128, 16), (12, 8, 4), (7, 5, 1)])
def test_a_piece_is_as_long_as_both_allow(mine, theirs, expected):
    assert tokens_of_a_piece(mine, theirs) == expected


def test_regions_are_cut_into_pieces_without_gaps():
    (region,) = regions_in_pieces([1000], [64], 0, 10, 4)
    assert (region.address, region.num_bytes, region.stride, region.count) == (1000, 16, 16, 40)
