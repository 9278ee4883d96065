"""Pearson's chi-square test of whether tokens were drawn from the expected probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Fit:
    """The fit of counts to probabilities: the statistic, its degrees of freedom, and the total
    variation distance.
    """

    statistic: float
    freedom: int
    total_variation: float

    @property
    def p_value(self) -> float:
        """The probability of a statistic at least this large."""
        if not self.freedom:
            return 1.0
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


def fit(counts: np.ndarray, probabilities: np.ndarray) -> Fit:
    """Fit counts `[n]` or `[groups, n]` to probabilities of the same shape, which sum to 1 in each
    group.

    In each group, the rarest tokens are pooled until at least five are expected.
    """
    fits = [_fit_one(*case) for case in zip(np.atleast_2d(counts), np.atleast_2d(probabilities), strict=True)]
    weights = np.atleast_2d(counts).sum(-1) / counts.sum()
    return Fit(
        sum(fit.statistic for fit in fits),
        sum(fit.freedom for fit in fits),
        float(np.dot(weights, [fit.total_variation for fit in fits])),
    )


def _fit_one(counts: np.ndarray, probabilities: np.ndarray) -> Fit:
    drawn, possible = counts.sum(), probabilities > 0
    assert not counts[~possible].any(), "an impossible token was drawn"
    if not drawn:
        return Fit(0.0, 0, 0.0)
    distance = float(np.abs(counts / drawn - probabilities).sum() / 2)
    order = np.argsort(probabilities[possible])
    observed, expected = counts[possible][order], probabilities[possible][order] * drawn
    rare = int((expected.cumsum() < 5).sum()) + 1
    observed = np.append(observed[:rare].sum(), observed[rare:])
    expected = np.append(expected[:rare].sum(), expected[rare:])
    return Fit(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1, distance)
