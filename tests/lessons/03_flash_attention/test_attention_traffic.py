"""The bytes of attention: the walked loop against its closed form, its bounds, and what fits on
the chip.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm_lab import aot
from minivllm_lab.flash_attention.attention_traffic import (
    CHIPS,
    OTHER_REGISTERS,
    REGISTER_FILE,
    flash_traffic,
    largest_block_q,
    least_traffic,
    most_queries_kept,
    most_queries_launched,
    naive_traffic,
    register_bytes,
    shared_memory_bytes,
)
from minivllm_lab.flash_attention.online_softmax import online_softmax
from minivllm_simulate.hardware import HARDWARE

sizes = st.integers(1, 300)


def test_naive_traffic_is_the_papers_algorithm():
    """A 2 MiB matrix makes four trips, and Q, K, V and O have 128 KiB each, for 16 bits, 1,024
    tokens and head dim 64.
    """
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


@given(st.integers(1, 512), st.sampled_from([16, 32, 128]), st.sampled_from([64, 80, 128]), st.sampled_from([1, 2, 4]))
def test_the_largest_tile_fits_and_a_larger_one_does_not(kib, block_k, head_dim, itemsize):
    def needed(rows):
        tiles = shared_memory_bytes(rows, block_k, head_dim, stages=1, itemsize=itemsize)
        return sum(tiles.values()) + sum(register_bytes(rows, block_k, head_dim, itemsize).values())

    if needed(16) > kib * 1024:
        assert_refused("tile", largest_block_q, kib * 1024, head_dim, block_k, itemsize)
        return
    rows = largest_block_q(kib * 1024, head_dim, block_k, itemsize)
    assert rows % 16 == 0
    assert needed(rows) <= kib * 1024 < needed(rows + 16)


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


# Bytes that a thread of the lesson's `flash_kernel` spills, as Triton 3.9 compiles it with 8 warps:
# head dim -> (queries, keys) -> bytes
ON_HOPPER = {
    64: {(64, 128): 0, (128, 128): 0, (256, 64): 0, (512, 16): 0, (256, 128): 24, (512, 32): 168, (512, 64): 408},
    128: {(128, 128): 0, (256, 16): 0, (256, 32): 0, (256, 64): 144, (256, 128): 448, (512, 16): 856, (512, 32): 1008},
    256: {(64, 64): 0, (128, 32): 0, (128, 64): 0, (256, 16): 1240, (256, 32): 1280},
}
ON_AMPERE = {
    64: {(128, 64): 0, (256, 32): 0, (256, 64): 0, (256, 128): 272, (512, 32): 136},
    128: {(64, 128): 0, (128, 32): 0, (128, 64): 0, (256, 16): 16, (256, 32): 104, (256, 64): 168, (512, 16): 3752},
    256: {(64, 64): 0, (128, 16): 136, (128, 64): 144, (256, 16): 632},
}


@pytest.mark.parametrize(("gpu", "compiled"), [("H100", ON_HOPPER), ("A100-80", ON_AMPERE)])
def test_registers_spill_where_the_compiler_says_so(gpu, compiled):
    """Ampere's compiler also spills a few bytes of tiles of 128 keys that the model accepts: it is
    only a model.
    """
    for head_dim, tiles in compiled.items():
        for (block_q, block_k), spilled in tiles.items():
            kept = most_queries_kept(CHIPS[gpu], block_k, head_dim)
            assert (block_q > kept) == (spilled > 0), (head_dim, block_q, block_k)


@pytest.mark.parametrize(
    ("block_q", "block_k", "stages", "shared"),
    [(64, 32, 2, 49152), (128, 64, 2, 98304), (128, 128, 2, 163840), (128, 128, 4, 294912), (256, 64, 2, 131072)],
)
def test_shared_memory_is_what_the_compiler_asks_for(block_q, block_k, stages, shared):
    """The lesson's table is compared with kernels compiled for sm_90."""
    assert sum(shared_memory_bytes(block_q, block_k, 128, stages).values()) == shared


def test_the_chips_are_those_that_we_compile_for():
    assert CHIPS["A100-80"].shared_memory == aot.SHARED_MEMORY["sm_80"]
    assert CHIPS["H100"].shared_memory == CHIPS["H200"].shared_memory == aot.SHARED_MEMORY["sm_90"]
    assert set(CHIPS) <= set(HARDWARE)


@pytest.mark.parametrize(
    ("gpu", "head_dim", "block_q", "block_k", "stages"),
    [("H100", 128, 128, 128, 2), ("H100", 256, 128, 80, 2), ("A100-80", 64, 128, 112, 1), ("A100-80", 256, 128, 96, 1)],
)
def test_published_tiles_can_be_launched(gpu, head_dim, block_q, block_k, stages):
    """The tiles are FlashAttention's own (hopper/tile_size.h, causal), which says of 128 × 80 that
    it is all that fits.
    """
    assert block_q <= most_queries_launched(CHIPS[gpu], block_k, head_dim, stages)
    if head_dim == 256 and gpu == "H100":
        assert block_q > most_queries_launched(CHIPS[gpu], block_k + 16, head_dim, stages)


@given(st.sampled_from(sorted(CHIPS)), st.integers(1, 512), st.sampled_from([64, 128, 256]), st.integers(1, 4))
def test_one_query_more_is_too_many(gpu, block_k, head_dim, stages):
    chip = CHIPS[gpu]
    launched, kept = most_queries_launched(chip, block_k, head_dim, stages), most_queries_kept(chip, block_k, head_dim)
    shared = [sum(shared_memory_bytes(q, block_k, head_dim, stages).values()) for q in (max(launched, 1), launched + 1)]
    assert (shared[0] <= chip.shared_memory) == (launched > 0)
    assert shared[1] > chip.shared_memory
    room = REGISTER_FILE - OTHER_REGISTERS
    taken = [register_bytes(q, block_k, head_dim, q_in_registers=chip.q_in_registers) for q in (kept, kept + 1)]
    assert sum(taken[0].values()) <= room < sum(taken[1].values())
