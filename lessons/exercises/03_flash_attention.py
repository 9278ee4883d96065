"""Exercise 03. Write the online softmax: one step of it, the merge of two results, and the tiled loop around it.

Fill in the three functions, then ask what is still missing:

    make check N=03

Needed: lesson 03 up to "The mechanism". NumPy is enough. The solution is in vllm/03_flash_attention.py; try first.
"""

from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Attention of some queries over some of their keys, not yet divided."""

    m: np.ndarray  # [rows]            the largest score so far; -inf where no key was seen
    l: np.ndarray  # [rows]            the sum of exp(score - m)
    o: np.ndarray  # [rows, head_dim]  the sum of exp(score - m) times the value of the key


def nothing_seen(rows: int, head_dim: int) -> Partial:
    """Attention over no key at all. (Given.)"""
    return Partial(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, head_dim)))


def finish(state: Partial):
    """(output [rows, head_dim], logarithm of each row's sum [rows]); a row without keys gives 0 and -inf. (Given.)"""
    l = np.maximum(state.l, 1.0)  # exact: the key with the largest score adds exp(0) = 1
    return state.o / l[..., None], state.m + np.log(l)


def softmax_step(state: Partial, scores, values) -> Partial:
    """Take one more tile of keys into the state.

    scores  [rows, keys]      of this tile's keys; -inf where a query may not see the key
    values  [keys, head_dim]
    returns the state over all keys seen so far, as a new Partial

    1. The new maximum is the larger of the old one and the tile's.
    2. What was summed under the old maximum shrinks by exp(old m - new m): l *and* o.
    3. The tile adds its exp(score - new m) to l, and the same times its values to o.

    Traps: a row that sees no key of this tile, and saw none before, has the maximum -inf; -inf - -inf is not a number, and
    one NaN stays for ever. Such a row must come out as it went in. `state` belongs to the caller: do not change it.

    >>> state = softmax_step(nothing_seen(1, 1), np.array([[0.0]]), np.array([[10.0]]))
    >>> softmax_step(state, np.array([[np.log(3)]]), np.array([[20.0]]))   # weights 1/4 and 3/4
    Partial(m=array([1.09861229]), l=array([1.33333333]), o=array([[23.33333333]]))
    """
    raise NotImplementedError("the new maximum, the factor for the old sums, the new sums")


def merge(a: Partial, b: Partial) -> Partial:
    """Two results over different keys, for the same queries, as the one result over all these keys.

    m and l are [rows] and o [rows, head_dim]; or, for many heads at once, [rows, heads] and [rows, heads, head_dim].

    Each side was summed under its own maximum: bring both to the larger one, then add.

    Traps: the sides count as their l says, so an average of the two outputs is wrong. A side, or both, may have seen no
    key (m = -inf, l = 0, o = 0), and must then change nothing.
    """
    raise NotImplementedError("bring both sides to the larger maximum, then add l and o")


def tiled_attention(q, k, v, block_q: int, block_k: int):
    """Causal attention of one head, a tile of queries at a time, each over its tiles of keys.

    q, k, v [T, head_dim] -> (output [T, head_dim], logarithm of each row's sum [T])

    For each tile of `block_q` queries: start from `nothing_seen`; for each tile of `block_k` keys that some query of this
    tile sees, compute scores = q · k / sqrt(head_dim), put -inf where the key lies ahead of the query (query i sees keys
    0 to i), and take one `softmax_step`; at the end `finish`, and write out what comes of it. `np.empty_like(q)` makes
    the output. The last tiles may be shorter than the others.

    Traps: reading keys that no query of the tile sees gives the right answer at twice the traffic: the check counts the
    bytes. Slice each tile once: what you slice travels. A matrix of T × T anywhere is what this is all about avoiding.
    """
    raise NotImplementedError("two loops over tiles: queries outside, keys inside")
