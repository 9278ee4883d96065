"""Slow memory counts every byte that goes in or out, and nothing else."""

import numpy as np

from minivllm_lab.flash_attention.slow_memory import SlowArray, in_slow_memory


def test_slices_count_and_come_as_plain_arrays():
    (a, b), trips = in_slow_memory(np.arange(12.0).reshape(4, 3), np.zeros((4, 3), np.float32))
    tile = a[1:3]
    assert type(tile) is np.ndarray
    assert tile.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert (trips.read, trips.written) == (2 * 3 * 8, 0)
    _ = tile + tile  # on the chip: free
    b[2:] = 7
    assert (trips.read, trips.written) == (48, 2 * 3 * 4)
    assert np.asarray(b)[3, 0] == 7


def test_what_is_made_like_it_shares_its_count():
    (a,), trips = in_slow_memory(np.zeros((2, 2)))
    built = np.empty_like(a, shape=(3, 3), dtype=np.float32)
    assert isinstance(built, SlowArray)
    built[:] = 1
    assert trips.written == 36
