"""The online softmax, one row in plain Python: what a tile of scores does to the running maximum,
sum and output.

Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax in one pass, Dao et al. 2022 (arXiv
2205.14135) for the output computed with it. In vLLM: `vllm/v1/attention/ops/triton_attention_helpers.py`,
`softmax_step`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class RunningSoftmax(NamedTuple):
    """One query's attention over the keys seen so far."""

    m: float
    """The largest score so far."""
    l: float  # noqa: E741 (the paper's letter)
    """The sum of exp(score - m)."""
    o: tuple[float, ...]
    """The sum of exp(score - m) times the value, not yet divided by l."""

    @property
    def output(self) -> tuple[float, ...]:
        """Return the attention over the keys so far, or zeros if there were none."""
        return tuple(part / self.l if self.l else 0.0 for part in self.o)


def softmax_step(state: RunningSoftmax, scores: Sequence[float], values: Sequence[Sequence[float]]) -> RunningSoftmax:
    """Add one more tile to the state: `scores` of its keys (-inf where masked) and their
    `values`.
    """
    m = max(state.m, *scores)
    if m == -math.inf:  # no key seen yet, and exp(-inf - -inf) is not a number
        return state
    keep = math.exp(state.m - m)
    weights = [math.exp(score - m) for score in scores]
    added = [sum(weight * value[d] for weight, value in zip(weights, values, strict=True)) for d in range(len(state.o))]
    return RunningSoftmax(
        m, keep * state.l + sum(weights), tuple(keep * old + new for old, new in zip(state.o, added, strict=True))
    )


def online_softmax(scores: Sequence[float], values: Sequence[Sequence[float]], tile: int) -> list[RunningSoftmax]:
    """Return the states before the first and after each tile of `tile` keys."""
    states = [RunningSoftmax(-math.inf, 0.0, (0.0,) * len(values[0]))]
    for start in range(0, len(scores), tile):
        states.append(softmax_step(states[-1], scores[start : start + tile], values[start : start + tile]))
    return states
