"""Bytes that a kernel fetches through a block table: the formula agrees with a walk over the
addresses.
"""

import pytest

from minivllm_lab.paged_attention.paged_traffic import LINE, SECTOR, fetched


def walked(length: int, block_size: int, row: int, piece: int, per_token: bool) -> tuple[int, int]:
    """Count the pieces touched, one at a time: an entry for each block or token, and a block's run
    of keys and of values.
    """
    runs = reads = 0
    for start in range(0, length, block_size):
        tokens = range(start, min(start + block_size, length))
        touched = {(token - start) * row // piece for token in tokens} | {
            ((token - start + 1) * row - 1) // piece for token in tokens
        }
        if row > piece:
            touched = set(range(-(-len(tokens) * row // piece)))
        runs += 2 * len(touched) * piece
        reads += len(tokens) if per_token else 1
    return runs, reads * piece


@pytest.mark.parametrize("piece", [SECTOR, LINE])
@pytest.mark.parametrize("row", [16, 64, 128, 256])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_formula_counts_what_a_walk_counts(piece: int, row: int, per_token: bool):
    for length in (1, 5, 16, 33, 100):
        for block_size in (1, 2, 3, 16, 64):
            counted = fetched(length, block_size, row, piece, per_token=per_token)
            assert counted == walked(length, block_size, row, piece, per_token)


def test_by_hand():
    """Keys and values of 32 tokens of 256 bytes need 16,384 bytes: two blocks of 16, and two
    sectors for their entries.
    """
    assert fetched(32, 16, 256) == (16384, 64)
    assert fetched(32, 1, 64, LINE) == (2 * 32 * LINE, 32 * LINE), "half a line for keys, half for values"
    assert fetched(32, 512, 256, per_token=True)[1] == 32 * SECTOR, "larger blocks save such a kernel nothing"
