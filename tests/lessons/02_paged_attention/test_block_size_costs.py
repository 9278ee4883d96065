"""Both costs of a block size: by hand, against what lesson 02 left, and against the lesson's
formula.
"""

import json
from pathlib import Path

import pytest

from minivllm.errors import MinivllmError
from minivllm_lab.paged_attention.block_size_costs import Moment, fetched_in_vain, held, moments
from minivllm_lab.paged_attention.paged_traffic import fetched
from minivllm_simulate.workloads import WORKLOADS, RequestLengths

LEFT = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "02_paged_attention.cpu.json"


def test_held_by_hand():
    """Ten tokens in blocks of 4 take three blocks, with two empty slots. Two samples of it share
    the two full blocks.
    """
    cost = held([Moment(9, 10, 1)], 4)
    assert (cost.slots, cost.tokens, cost.empty) == (12, 10, pytest.approx(2 / 12))
    two = held([Moment(9, 10, 1)], 4, samples=2)
    assert (two.slots, two.tokens, two.unshared) == (16, 12, 24)
    assert two.saved == pytest.approx(1 / 3)


def test_who_lives_longer_weighs_more():
    short, long = Moment(1, 1, 1), Moment(4, 4, 3)
    assert held([short, long], 4).empty == pytest.approx(3 / 16)


def test_fetched_by_hand_and_whatever_the_samples():
    seen = [Moment(9, 10, 1), Moment(1, 20, 2)]
    needed = 2 * 64 * (10 + 2 * 20)
    total = sum(fetched(10, 4, 64)) + 2 * sum(fetched(20, 4, 64))
    assert fetched_in_vain(seen, 4, 64) == pytest.approx(total / needed - 1)


def test_moments_lie_between_the_first_output_token_and_the_last():
    lengths = [RequestLengths(5, 1 + number) for number in range(50)]
    for moment, length in zip(moments(lengths), lengths, strict=True):
        assert 6 <= moment.tokens <= length.total
        assert moment.weight == length.output_tokens


@pytest.mark.parametrize("name", ["alpaca", "sharegpt", "azure-conversation"])
def test_the_empty_share_is_that_of_the_lessons_replay_on_a_real_pool(name: str):
    empty = json.loads(LEFT.read_text())["figures"]["blocks"]["empty"][name]
    lengths = [request for request in WORKLOADS[name].sample(2000) if request.total <= 2048]
    for size, share in empty.items():
        assert held(moments(lengths), int(size)).empty == pytest.approx(share, rel=0.2, abs=0.001)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: held([], 4),
        lambda: held([Moment(1, 1, 1)], 0),
        lambda: fetched_in_vain([], 4, 64),
        lambda: fetched_in_vain([Moment(1, 1, 1)], 4, 0),
    ],
)
def test_what_cannot_be_is_refused(ask):
    with pytest.raises(MinivllmError):
        ask()
