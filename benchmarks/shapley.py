"""Shapley values: the worth of each of several levers when its gain depends on which others are on.

A lever's value is what switching it on adds, averaged over all orders in which the levers could be
switched on (L. Shapley, "A Value for n-Person Games", 1953). The values of all levers add up to the
gain of switching all of them on, so nothing is counted twice and nothing is left over.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import factorial


def subsets(levers: Sequence[str]) -> list[frozenset[str]]:
    """Return all sets of levers that can be on, the empty one first: 2**len(levers)."""
    return [frozenset(which) for size in range(len(levers) + 1) for which in combinations(levers, size)]


def shapley_values(levers: Sequence[str], worth: Mapping[frozenset[str], float]) -> dict[str, float]:
    """Return each lever's mean contribution over all orders of switching on; `worth` may have any
    unit that adds up.
    """
    count, values = len(levers), dict.fromkeys(levers, 0.0)
    for lever in levers:
        others = [other for other in levers if other != lever]
        for before in subsets(others):
            share = factorial(len(before)) * factorial(count - len(before) - 1) / factorial(count)
            values[lever] += share * (worth[before | {lever}] - worth[before])
    return values
