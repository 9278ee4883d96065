"""Both costs of a block size: by hand, against what lesson 02 left, and against the lesson's
formula.
"""

import json

import pytest
from repository import ROOT

from minivllm_lab.paged_attention.block_size_costs import LINE, SECTOR, Moment, fetched, fetched_in_vain, held, moments
from minivllm_simulate.workloads import WORKLOADS

LEFT = ROOT / "benchmarks" / "results" / "02_paged_attention.cpu.json"


def test_held_by_hand():
    """Ten tokens in blocks of 4 take three blocks, with two empty slots. Two samples of it share
    the two full blocks.
    """
    cost = held([Moment(9, 10, 1)], 4)
    assert (cost.slots, cost.tokens, cost.empty) == (12, 10, pytest.approx(2 / 12))
    two = held([Moment(9, 10, 1)], 4, samples=2)
    assert (two.slots, two.tokens, two.unshared) == (16, 12, 24)
    assert two.saved == pytest.approx(1 / 3)


def test_fetched_by_hand_and_whatever_the_samples():
    seen = [Moment(9, 10, 1), Moment(1, 20, 2)]
    needed = 2 * 64 * (10 + 2 * 20)
    total = sum(fetched(10, 4, 64)) + 2 * sum(fetched(20, 4, 64))
    assert fetched_in_vain(seen, 4, 64) == pytest.approx(total / needed - 1)


@pytest.mark.parametrize("name", ["alpaca", "sharegpt", "azure-conversation"])
def test_the_empty_share_is_that_of_the_lessons_replay_on_a_real_pool(name: str):
    empty = json.loads(LEFT.read_text())["figures"]["blocks"]["empty"][name]
    lengths = [request for request in WORKLOADS[name].sample(2000) if request.total <= 2048]
    for size, share in empty.items():
        assert held(moments(lengths), int(size)).empty == pytest.approx(share, rel=0.2, abs=0.001)


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
@pytest.mark.parametrize("row", [16, 128])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_formula_counts_what_a_walk_counts(piece: int, row: int, per_token: bool):
    for length in (1, 5, 16, 33, 100):
        for block_size in (1, 2, 3, 16, 64):
            counted = fetched(length, block_size, row, piece, per_token=per_token)
            assert counted == walked(length, block_size, row, piece, per_token)
