"""The CPU counterpart of `rejection_sample.py`'s kernels, compiled by numba: a program walks one
request's drafts.
"""

from __future__ import annotations

import math

import numpy as np

from minivllm.kernels.cpu.cells import RejectionCells
from minivllm.kernels.cpu.gumbel_loops import TOKENS, draw_row, fastest_token, mixed
from minivllm.kernels.cpu.lanes import WIDTH, add, exp2_of_difference, load, multiply, same, subtract, sum_lanes, zero
from minivllm.kernels.cpu.programs import array_at, counter_of, exact_jit, programs, take_programs
from minivllm.kernels.noise import DECISION

NO_TOKEN = np.uint32(DECISION % 2**32)


@exact_jit
def log_sum(logits, vocab, top):
    """Return the logarithm of the sum of a row's exponentials, or infinity if no logit is
    finite, so that p is 0.
    """
    if not -np.inf < top < np.inf:
        return np.inf
    base, unit, sums = same(top), same(np.float32(1.0 / math.log(2.0))), zero()
    whole = vocab - vocab % WIDTH
    for i in range(0, whole, WIDTH):
        sums = add(sums, exp2_of_difference(multiply(subtract(load(logits, i), base), unit), zero()))
    total = np.float64(sum_lanes(sums))
    for i in range(whole, vocab):
        total += math.exp(np.float64(logits[i]) - top)
    return top + math.log(total)


@exact_jit
def decide(target, theirs, vocab, draft, top, their_top, first, second, numbers):
    """Decide on a draft that was drawn: return whether it is accepted, and it or the token that
    replaces it.
    """
    sum_p, sum_q = log_sum(target, vocab, top), log_sum(theirs, vocab, their_top)
    log_q = np.float64(theirs[draft]) - sum_q
    if log_q > -np.inf:
        # The row's `decision_number`.
        number = np.float64(mixed(NO_TOKEN, first, second) >> np.uint32(8)) * 2.0**-24
        if number < math.exp(np.float64(target[draft]) - sum_p - log_q):
            return True, draft
    else:  # it was not drawn from these logits
        sum_q = np.inf
    return False, fastest_token(target, sum_p, theirs, sum_q, vocab, first, second, draft, np.inf, numbers)


def walk_drafts(cells):
    """Walk the drafts of requests, one program each, until none are left."""
    requests, rows, vocab, width = cells.requests, cells.rows, cells.vocab, cells.width
    out = array_at(cells.out, requests * width, np.int64)
    num_drafts = rows - requests
    drafts, likeliest = array_at(cells.draft_token_ids, num_drafts, np.int64), array_at(cells.likeliest, rows, np.int64)
    starts, is_greedy = array_at(cells.starts, requests + 1, np.int64), array_at(cells.is_greedy, requests, np.uint8)
    tops, keys = array_at(cells.largest_of_draft, num_drafts, np.float32), array_at(cells.keys, 2 * rows, np.uint32)
    numbers = np.empty(TOKENS, np.float32)
    for request in take_programs(counter_of(cells), requests):
        for place in range(width):
            out[request * width + place] = -1
        for row in range(starts[request], starts[request + 1]):
            at = row - request  # every request has one row more than drafts
            token = likeliest[row]
            draft = drafts[at] if row + 1 < starts[request + 1] else -1
            logits = array_at(cells.target_logits + 4 * row * vocab, vocab, np.float32)
            first, second = keys[2 * row], keys[2 * row + 1]
            accepted = False
            if is_greedy[request]:
                accepted = token == draft
            elif cells.draft_logits and 0 <= draft < vocab:
                q, top = array_at(cells.draft_logits + 4 * at * vocab, vocab, np.float32), logits[token]
                accepted, token = decide(logits, q, vocab, draft, top, tops[at], first, second, numbers)
            else:
                token = draw_row(logits, vocab, first, second, token, numbers)
                accepted = token == draft
            out[request * width + row - starts[request]] = token
            if not accepted:
                break


programs_for = programs(RejectionCells, walk_drafts, exact_jit)
