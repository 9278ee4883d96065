"""The functions of lesson 07's script that solve exercise 07, on which its checks are tried."""

from collections.abc import Sequence

import numpy as np

from minivllm.platforms.triton_utils import tl, triton


def propose_ngram(token_ids: Sequence[int], min_n: int, max_n: int, k: int) -> list[int]:
    """What followed the last tokens where they first stood: at most k drafts, perhaps none.

    Of the last min_n to max_n tokens, as many as also stand earlier.
    """
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        suffix = token_ids[-n:]
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == suffix:
                return list(token_ids[start + n : start + n + k])
    return []


def accept(p: np.ndarray, q: np.ndarray, drafts: Sequence[int], uniforms: np.ndarray) -> int:
    """How many drafts stand: x with probability min(1, p(x) / q(x)), up to the first that does not.

    p [drafts + 1, vocab] is what the target says in each place, q [drafts, vocab] what the drafts were drawn from;
    uniforms [drafts] are from 0 up to, not including, 1. −1 is no draft.
    """
    for i, x in enumerate(drafts):
        if x < 0 or uniforms[i] * q[i, x] >= p[i, x]:
            return i
    return len(drafts)


def recovered(p: np.ndarray, q: np.ndarray | float, noise: np.ndarray) -> int:
    """A draw from max(p − q, 0), normalised, by a race: token x arrives at noise(x) / weight(x), the first one wins.

    All are [vocab]; noise is drawn from the exponential distribution.
    """
    return int(np.argmax(np.maximum(p - q, 0) / noise))


def verify(p: np.ndarray, q: np.ndarray, drafts: Sequence[int], uniforms: np.ndarray, noise: np.ndarray) -> list[int]:
    """The tokens of one step: the drafts that stand, and one of the target's own. noise [drafts + 1, vocab]."""
    n = accept(p, q, drafts, uniforms)
    rejected = q[n] if n < len(drafts) else 0  # if all stand, nothing is taken from p: a bonus
    return [*drafts[:n], recovered(p[n], rejected, noise[n])]


@triton.jit
def greedy_kernel(output, drafts, target, num_drafts, BLOCK: tl.constexpr):
    """One greedy request: output int32 [num_drafts + 1] gets the drafts that stand, a token more, then −1. Grid: (1,).

    drafts int32 [num_drafts], −1 for none; target int32 [num_drafts + 1], the likeliest tokens; BLOCK > num_drafts.
    """
    place = tl.arange(0, BLOCK)
    draft = tl.load(drafts + place, mask=place < num_drafts, other=-1)
    token = tl.load(target + place, mask=place <= num_drafts, other=-2)
    num_accepted = tl.min(tl.where(draft == token, BLOCK, place), axis=0)
    tl.store(output + place, tl.where(place <= num_accepted, token, -1), mask=place <= num_drafts)


@triton.jit
def ragged_kernel(output, drafts, target, draft_start, width, BLOCK: tl.constexpr):
    """Many of them, output int32 [requests, width]. Grid: (requests,). Request i has the drafts from draft_start[i] to
    draft_start[i + 1], int32 [requests + 1], and one target more than drafts, as has each before it."""
    request, place = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.load(draft_start + request)
    num_drafts = tl.load(draft_start + request + 1) - start
    draft = tl.load(drafts + start + place, mask=place < num_drafts, other=-1)
    token = tl.load(target + start + request + place, mask=place <= num_drafts, other=-2)
    num_accepted = tl.min(tl.where(draft == token, BLOCK, place), axis=0)
    tl.store(output + request * width + place, tl.where(place <= num_accepted, token, -1), mask=place < width)


@triton.jit
def rejection_kernel(
    output, drafts, instead, p, q, uniforms, draft_start, width, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """`verify` for many requests. Grid: (requests,). As `ragged_kernel`, with chance.

    instead int32 [drafts + requests]: the token that follows where no more drafts stand, recovered or a bonus; p
    float32 [drafts + requests, vocab_size], q [drafts, vocab_size], uniforms [drafts]. Reads 16 bytes a draft and 12 a
    request; writes 4 * width bytes a request. Of a row of p or q it reads one number.
    """
    request, place = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.load(draft_start + request)
    num_drafts = tl.load(draft_start + request + 1) - start
    draft = tl.load(drafts + start + place, mask=place < num_drafts, other=-1)
    there, row = draft >= 0, (start + place).to(tl.int64)
    p_draft = tl.load(p + (row + request) * vocab_size + draft, mask=there, other=0.0)
    q_draft = tl.load(q + row * vocab_size + draft, mask=there, other=1.0)
    uniform = tl.load(uniforms + row, mask=there, other=0.0)
    num_accepted = tl.min(tl.where(uniform * q_draft < p_draft, BLOCK, place), axis=0)
    last = tl.load(instead + start + request + num_accepted)
    token = tl.where(place < num_accepted, draft, tl.where(place == num_accepted, last, -1))
    tl.store(output + request * width + place, token, mask=place < width)
