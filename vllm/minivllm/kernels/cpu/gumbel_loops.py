"""The CPU version of `worker/sample/gumbel.py`, compiled by numba. It computes the noise of only
the few tokens that could win.

The largest of logit + noise is the smallest of E / w, where E = -log(1 - v) is the token's waiting
time and w the exponential of its logit. E is never below v, so a token can only win where v < best
* w, or in logarithms, log2(v) < log2(best) + log2(w). The bits of a float32, read as an integer,
approximate its base-2 logarithm from below, up to a factor and a constant. So testing a token takes
its hash, an addition and a comparison, which the compiler vectorizes; only the tokens that pass,
about ten of 4,096, need a logarithm and an exponential.
"""

from __future__ import annotations

import math

import numpy as np

from minivllm.kernels.cpu.cells import DrawCells
from minivllm.kernels.cpu.programs import array_at, as_int32, counter_of, exact_jit, programs, take_programs

TOKENS = 256  # tested at a time
UNIT = 2.0**23  # added to the bits of a float32 by one in the exponent
BITS_OF_ONE = 127 * UNIT
ROUNDING = 1024.0  # more than the rounding error of the float32 test
SCALE = 2.0**-32  # maps the hash to [0, 1)


@exact_jit
def mixed(token, first, second):
    """Hash a token id with a row's key to uint32. Numba promotes every operation to uint64,
    hence the casts.
    """
    x = np.uint32(np.uint32(token * np.uint32(0x9E3779B9)) ^ first)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(np.uint32(x * np.uint32(0x7FEB352D)) ^ second)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@exact_jit
def bound(best):
    """Return the limit below which a token's bits minus its logit, in the same units, must be
    for it to beat `best`.
    """
    return np.float32((math.log2(best) - math.log2(SCALE)) * UNIT + BITS_OF_ONE + ROUNDING)


@exact_jit
def uniform(hashed):
    """Return 2^32 times the number v of a token."""
    return np.float32(hashed) + np.float32(0.5)


@exact_jit
def waiting_time(number):
    """Return E from 2^32 times v."""
    return -math.log1p(-np.float64(number) * SCALE)


@exact_jit
def fastest_token(logits, base, others, other_base, vocab, first, second, token, best, numbers):
    """Return the token of the smallest E / w, where w is exp(logit - base) - exp(other -
    other_base), if that is positive.

    `token` has the smallest known, `best`; an `other_base` of infinity leaves nothing of the
    others. `numbers` [TOKENS] is scratch space for hashes as float32.
    """
    top = np.float32(base)
    unit = np.float32(UNIT / math.log(2.0))
    limit = bound(best)
    for start in range(0, vocab, TOKENS):
        count = min(TOKENS, vocab - start)
        for i in range(count):
            numbers[i] = uniform(mixed(np.uint32(np.uint32(start) + np.uint32(i)), first, second))
        passed = 0  # counted in a loop without branches, which the compiler vectorizes
        for i in range(count):
            passed += np.float32(as_int32(numbers[i])) - unit * (logits[start + i] - top) < limit
        if not passed:
            continue  # most blocks of tokens end here
        for i in range(count):
            if np.float32(as_int32(numbers[i])) - unit * (logits[start + i] - top) < limit:
                weight = math.exp(np.float64(logits[start + i]) - base)
                weight -= math.exp(np.float64(others[start + i]) - other_base)
                if weight > 0.0 and waiting_time(numbers[i]) < best * weight:
                    best, token = waiting_time(numbers[i]) / weight, start + i
                    limit = bound(best)
    return token


@exact_jit
def draw_row(logits, vocab, first, second, likeliest, numbers):
    """Draw one row's token; `numbers` as above."""
    # The likeliest token sets a first bound, which few others beat.
    best = waiting_time(uniform(mixed(np.uint32(likeliest), first, second)))
    base = logits[likeliest]
    return fastest_token(logits, base, logits, np.inf, vocab, first, second, likeliest, best, numbers)


def draw_rows(cells):
    """Draw rows, one program each, until none are left."""
    rows, vocab = cells.rows, cells.vocab
    keys, token_ids = array_at(cells.keys, 2 * rows, np.uint32), array_at(cells.token_ids, rows, np.int64)
    numbers = np.empty(TOKENS, np.float32)
    for row in take_programs(counter_of(cells), rows):
        logits = array_at(cells.logits + 4 * row * vocab, vocab, np.float32)
        token_ids[row] = draw_row(logits, vocab, keys[2 * row], keys[2 * row + 1], token_ids[row], numbers)


compiled_programs = programs(DrawCells, draw_rows, exact_jit)
