"""One step of one request in lesson 07's widget: drafts, what the model thinks of them, and the token after them.

Six tokens stand for a vocabulary. The distributions are made so that Σ min(p, q), which is the chance that a draft is
accepted, is the acceptance that the knobs ask for. The reader's own `accept` from exercise 07 decides in place of the
rule, and is measured at each place, with all drafts and evenly spaced random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.bounded import bounded

VOCABULARY = ("return", "a", "+", "b", "(", "self")
PEAK = 2.6
"""How many times likelier each token is for the drafter than the next: Σ min(p, q) can then be as low as 0.11."""
CALLS = 6000
"""Of the reader's `accept`, in all, while it is measured."""
PATIENCE = 0.5
"""Seconds of the processor's time that they may take."""
Distribution = tuple[float, ...]
Accept = Callable[[Any, Any, list[int], Any], int]


@dataclass(frozen=True)
class Place:
    """A place in the text: what the drafter (`q`) and the model (`p`) expect there, a draft and its random number."""

    p: Distribution
    q: Distribution
    draft: int
    uniform: float

    @property
    def ratio(self) -> float:
        """With what probability this draft is accepted."""
        return min(1.0, self.p[self.draft] / self.q[self.draft])

    @property
    def agreement(self) -> float:
        """Σ min(p, q): with what probability a draft from q is accepted."""
        return sum(map(min, self.p, self.q))

    @cached_property
    def residual(self) -> Distribution:
        """max(p - q, 0), normalised: from what is drawn where the draft is rejected."""
        more = [max(p - q, 0.0) for p, q in zip(self.p, self.q, strict=True)]
        total = sum(more)
        return tuple(one / total for one in more) if total else self.p


@dataclass(frozen=True)
class VerifyStep:
    """A step: a place for each draft, and what came of them."""

    places: tuple[Place, ...]
    bonus: Distribution
    """The model's distribution after all drafts."""
    kept: int
    """Drafts accepted."""
    token: int
    """The one after them: recovered where a draft was rejected, else the bonus."""

    @property
    def tokens(self) -> list[str]:
        """All tokens that the request has of this step."""
        return [VOCABULARY[place.draft] for place in self.places[: self.kept]] + [VOCABULARY[self.token]]

    @property
    def rejected(self) -> bool:
        """Whether a draft was rejected."""
        return self.kept < len(self.places)


@dataclass(frozen=True)
class Measured:
    """The reader's rule at each place: how often it accepts, how often it should, and what that does to the text."""

    rates: tuple[float, ...]
    right: tuple[float, ...]
    tolerance: float
    """No right rule is further off than this: half of the gap between two random numbers."""
    off: float
    """Total variation between the tokens that come out and the model's own, at the place where it is largest."""

    @property
    def wrong(self) -> int | None:
        """The first place whose acceptance is wrong; None where all are right."""
        pairs = zip(self.rates, self.right, strict=True)
        return next((i for i, (rate, right) in enumerate(pairs) if abs(rate - right) > self.tolerance + 1e-9), None)


@lru_cache(maxsize=256)
def verify_step(rates: tuple[float, ...], certain: bool, seed: int, accept: Accept | None = None) -> VerifyStep:
    """A step with a draft for each of `rates`, which are the acceptances by place.

    Args:
        rates: the conditional acceptance at each place.
        certain: the drafter names one token, as an n-gram proposer does, in place of a distribution.
        seed: of the distributions, the drafts and all random numbers.
        accept: the reader's own, in place of the rule.

    Raises:
        MinivllmError: `accept` never ends, or gives something else than a count of drafts.
    """
    places = tuple(_place(rate, certain, seed, index) for index, rate in enumerate(rates))
    drawing = random.Random(f"{seed} last")
    bonus, last = _weights(drawing), drawing.random()
    kept = len(places)
    if accept is not None:
        kept = _asked(accept, places, bonus)
    else:
        kept = next((i for i, place in enumerate(places) if place.uniform >= place.ratio), kept)
    after = places[kept].residual if kept < len(places) else bonus
    return VerifyStep(places, bonus, kept, _drawn(after, last))


def _place(rate: float, certain: bool, seed: int, index: int) -> Place:
    """A place whose Σ min(p, q) is `rate`; turning the rate changes p, and neither q nor the draft."""
    drawing = random.Random(f"{seed} {index}")
    order = drawing.sample(range(len(VOCABULARY)), len(VOCABULARY))
    draw, uniform, others = drawing.random(), drawing.random(), _weights(drawing)
    if certain:
        draft = order[0]
        rest = sum(others) - others[draft]
        p = tuple(rate if i == draft else (1 - rate) * one / rest for i, one in enumerate(others))
        return Place(p, tuple(float(i == draft) for i in range(len(p))), draft, uniform)
    ranked = [PEAK**-rank for rank in range(len(order))]
    q, far = ([0.0] * len(order) for _ in range(2))
    for token, near, distant in zip(order, ranked, reversed(ranked), strict=True):
        q[token], far[token] = near / sum(ranked), distant / sum(ranked)
    share = (1 - rate) / sum(max(a - b, 0.0) for a, b in zip(q, far, strict=True))
    p = tuple((1 - share) * a + share * b for a, b in zip(q, far, strict=True))
    return Place(p, tuple(q), _drawn(q, draw), uniform)


def _weights(drawing: random.Random) -> Distribution:
    found = [drawing.random() ** 2 + 0.02 for _ in VOCABULARY]
    return tuple(one / sum(found) for one in found)


def _drawn(weights: Sequence[float], uniform: float) -> int:
    """The token under `uniform` where their weights, which sum to 1, are laid end to end."""
    ends = list(accumulate(weights))
    fits = (token for token, end in enumerate(ends) if uniform * ends[-1] < end and weights[token] > 0)
    return next(fits, max(range(len(weights)), key=weights.__getitem__))


# ---- the reader's own rule


def _asked(accept: Accept, places: Sequence[Place], bonus: Distribution) -> int:
    import numpy as np  # the exercise's functions take its arrays; the widget itself does without

    p, q = np.array([*(place.p for place in places), bonus]), np.array([place.q for place in places])
    with bounded(PATIENCE, "your accept"):
        found = accept(p, q, [place.draft for place in places], np.array([place.uniform for place in places]))
    return _count(found, len(places))


def _count(found: Any, most: int) -> int:
    """What `accept` gave, as a number of drafts."""
    try:
        kept = int(found)
        fits = kept == found and 0 <= kept <= most
    except (TypeError, ValueError):
        fits, kept = False, 0
    if not fits:
        raise MinivllmError(f"your accept gives {str(found)[:80]!r}; it must be a whole number from 0 to {most}")
    return kept


@lru_cache(maxsize=64)
def measured(rates: tuple[float, ...], certain: bool, seed: int, accept: Accept) -> Measured:
    """How often `accept` takes the draft of each place, those before and after it being sure.

    Every draft that q may propose is tried with evenly spaced random numbers, so nothing is left to chance.

    Raises:
        MinivllmError: `accept` never ends, or gives something else than a count of drafts.
    """
    import numpy as np

    step = verify_step(rates, certain, seed)
    places, count = step.places, len(rates)
    p, q = np.array([*(place.p for place in places), step.bonus]), np.array([place.q for place in places])
    sure = [max(range(len(VOCABULARY)), key=lambda token: _over(place, token)) for place in places]
    tries = CALLS // (count * (1 if certain else len(VOCABULARY)))
    spaced = (np.arange(tries) + 0.5) / tries
    found = []
    with bounded(PATIENCE, "your accept"):
        for index, place in enumerate(places):
            uniforms = np.zeros((tries, count))
            uniforms[:, index] = spaced
            taken = [0.0] * len(VOCABULARY)
            for token in (token for token, one in enumerate(place.q) if one > 0):
                drafts = [*sure[:index], token, *sure[index + 1 :]]
                kept = (_count(accept(p, q, list(drafts), row), count) for row in uniforms)
                taken[token] = sum(one > index for one in kept) / tries
            found.append(taken)
    return Measured(
        rates=tuple(_acceptance(place, taken) for place, taken in zip(places, found, strict=True)),
        right=tuple(place.agreement for place in places),
        tolerance=0.5 / tries,
        off=max(_off(place, taken) for place, taken in zip(places, found, strict=True)),
    )


def _over(place: Place, token: int) -> float:
    return place.p[token] / place.q[token] if place.q[token] else -1.0


def _acceptance(place: Place, taken: Sequence[float]) -> float:
    return sum(q * one for q, one in zip(place.q, taken, strict=True))


def _off(place: Place, taken: Sequence[float]) -> float:
    """Total variation between p and what comes out where drafts are taken so, and others recovered."""
    left = 1 - _acceptance(place, taken)
    rows = zip(place.p, place.q, taken, place.residual, strict=True)
    return sum(abs(q * one + left * other - p) for p, q, one, other in rows) / 2
