"""Length distributions pass through the values that their sources print, and the same seed draws
the same requests.
"""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm_simulate.workloads import WORKLOADS, Lengths, gamma_arrivals, poisson_arrivals, workload

DISTRIBUTIONS = {(name, part): getattr(one, part) for name, one in WORKLOADS.items() for part in ("prompt", "output")}


@pytest.mark.parametrize("which", DISTRIBUTIONS, ids="-".join)
def test_mean_and_quantiles_are_the_sources(which):
    lengths = DISTRIBUTIONS[which]
    drawn = [lengths.quantile((index + 0.5) / 20_000) for index in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    for share, tokens in lengths.knots[1:-1]:
        assert lengths.quantile(share) == tokens


@pytest.mark.parametrize("which", DISTRIBUTIONS, ids="-".join)
@given(shares=st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=20))
def test_quantiles_rise_and_are_whole_tokens(which, shares):
    tokens = [DISTRIBUTIONS[which].quantile(share) for share in sorted(shares)]
    assert tokens == sorted(tokens)
    assert all(isinstance(count, int) and count >= 1 for count in tokens)


def test_a_seed_draws_the_same_requests_and_another_seed_others():
    chats = workload("sharegpt")
    assert chats.sample(50, seed=3) == chats.sample(50, seed=3)
    assert chats.sample(50, seed=3) != chats.sample(50, seed=4)
    assert chats.sample(20, seed=3) == chats.sample(50, seed=3)[:20]


def test_sampled_means_are_the_sources():
    for kind in WORKLOADS.values():
        drawn = kind.sample(20_000)
        assert statistics.mean(request.prompt_tokens for request in drawn) == pytest.approx(kind.prompt.mean, rel=0.03)
        assert statistics.mean(request.output_tokens for request in drawn) == pytest.approx(kind.output.mean, rel=0.03)


def test_a_distribution_without_quantiles_is_exponential():
    lengths = Lengths(100.0)
    assert lengths.quantile(0.5) == round(100 * 0.6931)
    assert lengths.quantile(0) == 1


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_bursts_keep_the_rate_and_spread_the_gaps(burstiness):
    times = gamma_arrivals(4.0, 20_000, burstiness, seed=2)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25 / burstiness**0.5, rel=0.06)
    assert gamma_arrivals(4.0, 50, 1.0, seed=2) == poisson_arrivals(4.0, 50, seed=2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: workload("nobody"), lambda: workload("alpaca").sample(0),
        lambda: workload("alpaca").prompt.quantile(1.0), lambda: poisson_arrivals(0, 3),
        lambda: gamma_arrivals(-1, 3), lambda: gamma_arrivals(1, 3, burstiness=0),
    ],
)  # fmt: skip
def test_nonsense_is_refused(wrong):
    assert_refused("", wrong)
