"""Simulate one step of one request: its drafts, the model's predictions, and the token after the
accepted drafts.

The vocabulary has six tokens. The distributions are chosen so that Σ min(p, q), the chance that a
draft is accepted, equals the acceptance that the knobs set. The reader's `accept` of exercise 07
replaces the rule, and is measured at each position, with all drafts and evenly spaced random
numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.checks.bounded import bounded

VOCABULARY = ("return", "a", "+", "b", "(", "self")
PEAK = 2.6
"""The ratio of the drafter's probabilities of successive tokens, with which Σ min(p, q) can be
as low as 0.11.
"""
CALLS = 6000
"""All calls of the reader's `accept` in a measurement."""
PATIENCE = 0.5
"""CPU seconds that these calls may take."""
Distribution = tuple[float, ...]
Accept = Callable[[Any, Any, list[int], Any], int]


@dataclass(frozen=True)
class Place:
    """One position: the distributions of the drafter (`q`) and the model (`p`), a draft, and its
    random number.
    """

    p: Distribution
    q: Distribution
    draft: int
    uniform: float

    @property
    def ratio(self) -> float:
        """Return the probability that this draft is accepted."""
        return min(1.0, self.p[self.draft] / self.q[self.draft])

    @property
    def agreement(self) -> float:
        """Return Σ min(p, q), the probability that a draft from q is accepted."""
        return sum(map(min, self.p, self.q))

    @cached_property
    def residual(self) -> Distribution:
        """Return the residual distribution, max(p - q, 0) normalised, from which the recovered
        token is drawn.
        """
        more = [max(p - q, 0.0) for p, q in zip(self.p, self.q, strict=True)]
        total = sum(more)
        return tuple(weight / total for weight in more) if total else self.p


@dataclass(frozen=True)
class VerifyStep:
    """A verified step: a position for each draft, and the outcome."""

    places: tuple[Place, ...]
    bonus: Distribution
    """The model's distribution after the last draft."""
    kept: int
    """Accepted drafts."""
    token: int
    """The recovered token after a rejected draft, or else the bonus token."""

    @property
    def tokens(self) -> list[str]:
        """Return all tokens that the request gets from this step."""
        return [VOCABULARY[place.draft] for place in self.places[: self.kept]] + [VOCABULARY[self.token]]

    @property
    def rejected(self) -> bool:
        """Return whether a draft was rejected."""
        return self.kept < len(self.places)


@dataclass(frozen=True)
class Measured:
    """Measurements of the reader's rule: its acceptance at each position, the right one, and the
    output's error.
    """

    rates: tuple[float, ...]
    right: tuple[float, ...]
    tolerance: float
    """The largest error of a right rule: half of the distance between two random numbers."""
    off: float
    """The largest total variation, over positions, between the output and the model's
    distribution.
    """

    @property
    def wrong(self) -> int | None:
        """Return the first position whose acceptance is wrong, or None."""
        pairs = zip(self.rates, self.right, strict=True)
        return next((i for i, (rate, right) in enumerate(pairs) if abs(rate - right) > self.tolerance + 1e-9), None)


@lru_cache(maxsize=256)
def verify_step(rates: tuple[float, ...], certain: bool, seed: int, accept: Accept | None = None) -> VerifyStep:
    """Simulate a step with one draft for each of `rates`, the acceptances by position.

    Args:
        rates: The conditional acceptance at each position.
        certain: The drafter proposes one token, as n-grams do, instead of a distribution.
        seed: The seed of the distributions, the drafts and all random numbers.
        accept: The reader's function, in place of the rule.

    Raises:
        MinivllmError: `accept` never ends, or returns something other than a count of drafts.
    """
    places = tuple(_place(rate, certain, seed, index) for index, rate in enumerate(rates))
    drawing = random.Random(f"{seed} last")
    bonus = _weights(drawing)
    last = drawing.random()
    kept = next((i for i, place in enumerate(places) if place.uniform >= place.ratio), len(places))
    if accept is not None:
        kept = _kept_by(accept, places, bonus)
    after = places[kept].residual if kept < len(places) else bonus
    return VerifyStep(places, bonus, kept, _drawn(after, last))


def _place(rate: float, certain: bool, seed: int, index: int) -> Place:
    """Create a position whose Σ min(p, q) is `rate`; another rate changes p, but neither q nor the
    draft.
    """
    drawing = random.Random(f"{seed} {index}")
    order = drawing.sample(range(len(VOCABULARY)), len(VOCABULARY))
    draw = drawing.random()
    uniform = drawing.random()
    others = _weights(drawing)
    if certain:
        draft = order[0]
        rest = sum(others) - others[draft]
        p = tuple(rate if i == draft else (1 - rate) * weight / rest for i, weight in enumerate(others))
        return Place(p, tuple(float(i == draft) for i in range(len(p))), draft, uniform)
    ranked = [PEAK**-rank for rank in range(len(order))]
    q, far = ([0.0] * len(order) for _ in range(2))
    for token, near, distant in zip(order, ranked, reversed(ranked), strict=True):
        q[token], far[token] = near / sum(ranked), distant / sum(ranked)
    share = (1 - rate) / sum(max(a - b, 0.0) for a, b in zip(q, far, strict=True))
    p = tuple((1 - share) * a + share * b for a, b in zip(q, far, strict=True))
    return Place(p, tuple(q), _drawn(q, draw), uniform)


def _weights(drawing: random.Random) -> Distribution:
    weights = [drawing.random() ** 2 + 0.02 for _ in VOCABULARY]
    return tuple(weight / sum(weights) for weight in weights)


def _drawn(weights: Sequence[float], uniform: float) -> int:
    """Return the token at which the cumulative weights reach `uniform`."""
    ends = list(accumulate(weights))
    fits = (token for token, end in enumerate(ends) if uniform * ends[-1] < end and weights[token] > 0)
    return next(fits, max(range(len(weights)), key=weights.__getitem__))


# ---- the reader's own rule


def _kept_by(accept: Accept, places: Sequence[Place], bonus: Distribution) -> int:
    import numpy as np  # only the exercise's functions need arrays

    p, q = np.array([*(place.p for place in places), bonus]), np.array([place.q for place in places])
    with bounded(PATIENCE, "your accept"):
        answer = accept(p, q, [place.draft for place in places], np.array([place.uniform for place in places]))
    return _count(answer, len(places))


def _count(answer: Any, most: int) -> int:
    """Check that `accept` returned a number of drafts, and return it."""
    try:
        kept = int(answer)
        fits = kept == answer and 0 <= kept <= most
    except (TypeError, ValueError):
        kept, fits = 0, False
    if not fits:
        raise MinivllmError(f"your accept returns {str(answer)[:80]!r}; it must be a whole number from 0 to {most}")
    return kept


@lru_cache(maxsize=64)
def measured(rates: tuple[float, ...], certain: bool, seed: int, accept: Accept) -> Measured:
    """Measure how often `accept` accepts the draft at each position while all other drafts are
    certain to be accepted.

    Every draft that q may propose is tried with evenly spaced random numbers, so nothing is left to
    chance.

    Raises:
        MinivllmError: `accept` never ends, or returns something other than a count of drafts.
    """
    import numpy as np

    step = verify_step(rates, certain, seed)
    places = step.places
    count = len(rates)
    p, q = np.array([*(place.p for place in places), step.bonus]), np.array([place.q for place in places])
    sure = [max(range(len(VOCABULARY)), key=lambda token: _over(place, token)) for place in places]
    tries = CALLS // (count * (1 if certain else len(VOCABULARY)))
    spaced = (np.arange(tries) + 0.5) / tries
    accepted = []
    with bounded(PATIENCE, "your accept"):
        for index, place in enumerate(places):
            uniforms = np.zeros((tries, count))
            uniforms[:, index] = spaced
            taken = [0.0] * len(VOCABULARY)
            for token in (token for token, weight in enumerate(place.q) if weight > 0):
                drafts = [*sure[:index], token, *sure[index + 1 :]]
                kept = (_count(accept(p, q, list(drafts), row), count) for row in uniforms)
                taken[token] = sum(number > index for number in kept) / tries
            accepted.append(taken)
    return Measured(
        rates=tuple(_acceptance(place, taken) for place, taken in zip(places, accepted, strict=True)),
        right=tuple(place.agreement for place in places),
        tolerance=0.5 / tries,
        off=max(_off(place, taken) for place, taken in zip(places, accepted, strict=True)),
    )


def _over(place: Place, token: int) -> float:
    return place.p[token] / place.q[token] if place.q[token] else -1.0


def _acceptance(place: Place, taken: Sequence[float]) -> float:
    return sum(q * rate for q, rate in zip(place.q, taken, strict=True))


def _off(place: Place, taken: Sequence[float]) -> float:
    """Return the total variation distance between p and the output under this acceptance, recovered
    tokens included.
    """
    left = 1 - _acceptance(place, taken)
    rows = zip(place.p, place.q, taken, place.residual, strict=True)
    return sum(abs(q * rate + left * residual - p) for p, q, rate, residual in rows) / 2
