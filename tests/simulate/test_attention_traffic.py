"""The bytes of attention: the walked loop against its closed form, its bounds, and what fits on the chip."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from minivllm.simulate.attention_traffic import (
    exponent,
    flash_traffic,
    largest_block_q,
    least_traffic,
    longest_naive,
    naive_traffic,
    on_chip_bytes,
)
from minivllm.simulate.online_softmax import online_softmax

sizes = st.integers(1, 300)


def test_naive_traffic_is_the_papers_algorithm():
    """16 bits, 1,024 tokens, head dim 64: four trips of a 2 MiB matrix, and Q, K, V, O of 128 KiB each."""
    traffic = naive_traffic(1024, 64)
    assert traffic.moved == 4 * 2 * 2**20 + 4 * 128 * 2**10
    assert traffic.extra == 2 * 2 * 2**20
    assert traffic.flops == 4 * 1024 * 1024 * 64


@given(sizes, st.integers(1, 130), sizes, sizes, st.sampled_from([1, 2, 4]))
def test_every_key_that_is_seen_is_read_once_for_each_tile_of_queries(length, head_dim, block_q, block_k, itemsize):
    row, tiles = head_dim * itemsize, math.ceil(length / block_q)
    whole = flash_traffic(length, head_dim, block_q, block_k, itemsize, causal=False)
    assert whole.read == length * row + tiles * 2 * length * row
    assert whole.written == length * row + 4 * length
    assert whole.flops == 4 * length * length * head_dim
    causal = flash_traffic(length, head_dim, block_q, block_k, itemsize)
    pairs_seen = length * (length + 1) // 2
    assert 4 * pairs_seen * head_dim <= causal.flops <= whole.flops
    assert least_traffic(length, head_dim, itemsize) <= causal.moved <= whole.moved
    assert causal.extra == whole.extra == 4 * length


def test_one_by_one_tiles_compute_each_pair_once():
    assert flash_traffic(50, 8, 1, 1).flops == 4 * (50 * 51 // 2) * 8


@given(st.integers(1, 512), st.sampled_from([16, 32, 128]), st.sampled_from([64, 80, 128]), st.sampled_from([1, 2, 4]))
def test_the_largest_tile_fits_and_a_larger_one_does_not(kib, block_k, head_dim, itemsize):
    def needed(rows):
        return sum(on_chip_bytes(rows, block_k, head_dim, itemsize).values())

    if needed(16) > kib * 1024:
        with pytest.raises(MinivllmError, match="tile"):
            largest_block_q(kib * 1024, head_dim, block_k, itemsize)
        return
    rows = largest_block_q(kib * 1024, head_dim, block_k, itemsize)
    assert rows % 16 == 0
    assert needed(rows) <= kib * 1024 < needed(rows + 16)


def test_traffic_grows_as_the_paper_says():
    """Theorem 2: T² d² / M. The tiles are the largest that fit; 16 keys each."""
    lengths, dims, chips = [2**n for n in range(14, 19)], [32, 64, 128, 256], [2**n for n in range(15, 21)]

    def moved(length=65536, head_dim=64, chip=2**17):
        return flash_traffic(length, head_dim, largest_block_q(chip, head_dim, 16), 16).moved

    assert exponent(lengths, [moved(length=length) for length in lengths]) == pytest.approx(2, abs=0.03)
    assert exponent(dims, [moved(head_dim=head_dim) for head_dim in dims]) == pytest.approx(2, abs=0.2)
    assert exponent(chips, [moved(chip=chip) for chip in chips]) == pytest.approx(-1, abs=0.1)


def test_only_the_queries_of_a_tile_decide():
    """The keys of a tile change what is read only at the diagonal; the queries, everywhere."""
    few, many = (flash_traffic(16384, 64, 128, block_k).moved for block_k in (16, 128))
    assert few == pytest.approx(many, rel=0.01)
    assert flash_traffic(16384, 64, 256, 64).moved == pytest.approx(many / 2, rel=0.03)


@given(st.integers(2**10, 2**44), st.integers(1, 128), st.sampled_from([1, 2, 4]))
def test_the_longest_that_fits(memory, heads, itemsize):
    longest = longest_naive(memory, heads, itemsize)
    assert heads * 2 * longest**2 * itemsize <= memory < heads * 2 * (longest + 1) ** 2 * itemsize


def test_a_fitted_power_is_the_power():
    xs = [3, 10, 200]
    assert exponent(xs, [5 * x**1.5 for x in xs]) == pytest.approx(1.5)
    for bad in (([1], [1]), ([1, 2], [1]), ([1, 2], [0, 1])):
        with pytest.raises(MinivllmError):
            exponent(*bad)


@pytest.mark.parametrize("name", ["length", "head_dim", "block_q", "block_k", "itemsize"])
def test_sizes_below_one_are_refused_by_name(name):
    arguments = {"length": 8, "head_dim": 8, "block_q": 8, "block_k": 8, "itemsize": 2, name: 0}
    with pytest.raises(MinivllmError, match=rf"{name}\b.*\b1\b.*\b0\b"):
        flash_traffic(**arguments)


@given(st.lists(st.floats(-500, 500) | st.just(-math.inf), min_size=1, max_size=30), st.integers(1, 31))
def test_the_online_softmax_is_the_softmax(scores, tile):
    values = [[math.sin(index), 1.0] for index in range(len(scores))]
    *_, last = online_softmax(scores, values, tile)
    top = max(scores)
    weights = [math.exp(score - top) if top > -math.inf else 0.0 for score in scores]
    assert last.m == top
    assert last.l == pytest.approx(sum(weights), rel=1e-9)
    expected = sum(weight * value[0] for weight, value in zip(weights, values, strict=True)) / (sum(weights) or 1)
    assert last.output == pytest.approx((expected, 1.0 if sum(weights) else 0.0), abs=1e-9)


def test_the_online_softmax_refuses_what_makes_no_sense():
    with pytest.raises(MinivllmError, match=r"\b1\b"):
        online_softmax([1.0], [[1.0]], 0)
    with pytest.raises(MinivllmError, match=r"\b2\b.*\b1\b"):
        online_softmax([1.0, 2.0], [[1.0]], 1)
