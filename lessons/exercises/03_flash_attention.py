"""Exercise 03. Write the online softmax: in NumPy, then as a kernel in three steps.

Fill in the functions, in any order, then ask what is still missing:

    make check N=03

Needed: lesson 03 to the end of "The mechanism". The kernels run in Triton's interpreter; no GPU is needed. As soon as
the checks of your `tiled_attention` pass, the same command runs the engine with it.
"""

import math
from typing import NamedTuple

import numpy as np

from minivllm.platforms.triton_utils import tl, triton


class Partial(NamedTuple):
    """Holds the attention of some queries over some of their keys, not yet divided by the sum of weights."""

    m: np.ndarray  # [rows]            the largest score so far; -inf where no key was seen
    l: np.ndarray  # [rows]            the sum of exp(score - m)
    o: np.ndarray  # [rows, head_dim]  the sum of exp(score - m) times the value of the key


def nothing_seen(rows: int, head_dim: int) -> Partial:
    """Return the attention over no key at all. (Given.)"""
    return Partial(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, head_dim)))


def finish(state: Partial):
    """Return (output [rows, head_dim], lse [rows]); a row without keys gives 0 and -inf. (Given.)"""
    l = np.maximum(state.l, 1.0)  # exact: the key with the largest score adds exp(0) = 1
    return state.o / l[..., None], state.m + np.log(l)


# ---- in NumPy --------------------------------------------------------------------------------------------------------


def softmax_step(state: Partial, scores, values) -> Partial:
    """Take one more tile of keys into the state.

    scores  [rows, keys]      of this tile's keys; -inf where a query may not see the key
    values  [keys, head_dim]
    returns the state over all keys seen so far, as a new Partial

    1. The new maximum is the larger of the old one and the tile's.
    2. The sums under the old maximum, l *and* o, shrink by exp(old m - new m).
    3. The tile adds its exp(score - new m) to l, and the same times its values to o.

    Traps: a row that sees no key of this tile, and saw none before, has the maximum -inf; -inf - -inf is not a number,
    and one NaN stays for ever. Such a row must come out as it went in. `state` belongs to the caller: do not change it.

    >>> state = softmax_step(nothing_seen(1, 1), np.array([[0.0]]), np.array([[10.0]]))
    >>> softmax_step(state, np.array([[np.log(3)]]), np.array([[20.0]]))   # weights 1/4 and 3/4
    Partial(m=array([1.09861229]), l=array([1.33333333]), o=array([[23.33333333]]))
    """
    raise NotImplementedError("the new maximum, the factor for the old sums, the new sums")


def merge(a: Partial, b: Partial) -> Partial:
    """Merge two results over different keys, for the same queries, into the result over all these keys.

    m and l are [rows] and o [rows, head_dim]; or, for many heads at once, [rows, heads] and [rows, heads, head_dim].

    Each side was summed under its own maximum: bring both to the larger one, then add.

    Traps: each side's weight is its l, so an average of the two outputs is wrong. A side, or both, may have seen no key
    (m = -inf, l = 0, o = 0), and must then change nothing.

    >>> left = Partial(np.array([np.log(2)]), np.array([1.5]), np.array([[16.0]]))
    >>> right = Partial(np.array([np.log(4)]), np.array([1.25]), np.array([[34.0]]))
    >>> merge(left, right)
    Partial(m=array([1.38629436]), l=array([2.]), o=array([[42.]]))
    """
    raise NotImplementedError("bring both sides to the larger maximum, then add l and o")


def tiled_attention(q, k, v, block_q: int, block_k: int):
    """Compute causal attention of one head, a tile of queries at a time, each over its tiles of keys.

    q     [queries, head_dim]   the last positions: query i is at position keys - queries + i
    k, v  [keys, head_dim]      at least as many as there are queries
    returns (output, like q; lse [queries])

    For each tile of `block_q` queries, start with `nothing_seen`. For each tile of `block_k` keys that some query of
    this tile sees, compute scores = q · k / sqrt(head_dim), put -inf where the key's position is larger than the
    query's, and take one `softmax_step`. At the end call `finish` and store its results. `np.empty_like(q)` makes the
    output. The last tiles may be shorter than the others.

    Traps: with 1 query over 10 keys, the query is at position 9 and sees all of them; forget the offset and it sees
    one. Reading keys that no query of the tile sees gives the right answer at twice the traffic, and so does slicing a
    tile twice: each slice counts as read, and the check counts the bytes. Never take more than `block_k` keys at once,
    and never keep a longer row of scores: that is the whole point.
    """
    raise NotImplementedError("two loops over tiles: queries outside, keys inside")


# ---- as a kernel -----------------------------------------------------------------------------------------------------
# A program takes one row of scores. Its state is two numbers and a vector, in float32 registers:
#     m, l = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
#     o = tl.zeros([HEAD_DIM], tl.float32)
# Scores come from memory here; flash_kernel makes them on the chip.


@triton.jit
def row_sums_kernel(m_out, l_out, scores, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """Step 1: store the largest score m of each row, and the sum of its exp(score - m). Grid: (rows,).

    scores        [rows, KEYS] float32; KEYS is a multiple of BLOCK
    m_out, l_out  [rows] float32

    Loop over tiles of BLOCK scores and load each once. A program reads 4 × KEYS bytes and writes 8.

    Trap: the sum so far was taken under the maximum so far.
    """
    raise NotImplementedError("load a tile, take the new maximum, correct l, add the tile; at the end store both")


@triton.jit
def row_output_kernel(out, scores, values, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Step 2: multiply the softmax of each row of scores by the values. Grid: (rows,).

    scores  [rows, KEYS] float32; KEYS is a multiple of BLOCK
    values  [KEYS, HEAD_DIM] float32; HEAD_DIM is a power of two
    out     [rows, HEAD_DIM] float32

    Extend the loop of step 1 with o beside m and l: a tile of values is [BLOCK, HEAD_DIM], and `tl.sum(…, axis=0)` adds
    up its rows. Divide once, at the end. A program reads 4 × KEYS × (1 + HEAD_DIM) bytes and writes 4 × HEAD_DIM.
    """
    raise NotImplementedError("the loop of row_sums_kernel, with a sum of values that is corrected as l is")


@triton.jit
def causal_rows_kernel(out, scores, values, rows, keys, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Step 3: do the same for rows at the last positions, over any number of keys. Grid: (rows,).

    scores  [rows, keys] float32; row i is at position keys - rows + i and sees the keys up to that position.
            Later scores were never computed: they may be anything, even NaN.
    values  [keys, HEAD_DIM] float32
    out     [rows, HEAD_DIM] float32

    Loop over the tiles that the row sees, and mask what it does not see of the last one. A masked element is not loaded
    and costs nothing: `tl.load(…, mask=…, other=…)`. So a row that sees n keys reads 4 × n × (1 + HEAD_DIM) bytes.

    Traps: the offset keys - rows. A score that is not loaded must count as -inf, not as 0. Without `other`, an element
    that is not loaded is undefined, NaN in the checks, and 0 * NaN is NaN.
    """
    raise NotImplementedError("the loop of row_output_kernel, up to the row's last key, with masked loads")
