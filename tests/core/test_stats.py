"""Test the scheduler's statistics."""

from minivllm.core.stats import SpecDecodingStats


def test_drafts_since_an_earlier_snapshot():
    """A position that the earlier snapshot does not have counts as zero in it."""
    result = SpecDecodingStats(40, 100, 45, [30, 10, 5]).since(SpecDecodingStats(20, 40, 15, [10, 5]))
    assert result == SpecDecodingStats(20, 60, 30, [20, 5, 5])
    assert result.mean_acceptance_length == 1 + 30 / 20
    assert result.acceptance_rate == 0.5
    assert result.acceptance_rates_per_pos == [1.0, 0.25, 0.25]
