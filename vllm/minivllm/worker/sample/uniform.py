"""One random number a token, made of nothing but the request's seed and the token's place: SplitMix64, counter-based.

Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014. There is no generator whose state
could depend on what else is in the batch, or be lost when a request is preempted; and a GPU gets the same numbers as a
CPU.
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 40


def uniform(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Float64 numbers from 0 up to 1, exclusive, for uint64 `seeds` [n] and `places` [n], such as a token's position.

    40 bits each: fewer than a float64 holds, so that a product with a probability mass never rounds up to the mass.
    """
    state = _mix(seeds.astype(np.uint64)) + (places.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(64 - _BITS)) * 2.0**-_BITS


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
