"""A solution of exercise 07, which its checks are tried on."""

import numpy as np

from minivllm.platforms.triton_utils import tl, triton


def propose_ngram(token_ids, min_n, max_n, k):
    """The tokens after the first occurrence of the longest suffix."""
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        suffix = token_ids[-n:]
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == suffix:
                return token_ids[start + n : start + n + k]
    return []


def accept(p, q, drafts, uniforms):
    """How many leading drafts pass u < p / q."""
    for i, draft in enumerate(drafts):
        if draft < 0 or uniforms[i] * q[i, draft] >= p[i, draft]:
            return i
    return len(drafts)


def recovered(p, q, noise):
    """A draw from max(p - q, 0) by an exponential race."""
    return int(np.argmax(np.maximum(p - q, 0) / noise))


def verify(p, q, drafts, uniforms, noise):
    """The accepted drafts, and a recovered or bonus token."""
    n = accept(p, q, drafts, uniforms)
    rejected = q[n] if n < len(drafts) else 0
    return [*drafts[:n], recovered(p[n], rejected, noise[n])]


@triton.jit
def greedy_kernel(output, drafts, target, num_drafts, BLOCK: tl.constexpr):
    """One request, greedy."""
    place = tl.arange(0, BLOCK)
    draft = tl.load(drafts + place, mask=place < num_drafts, other=-1)
    token = tl.load(target + place, mask=place <= num_drafts, other=-2)
    num_accepted = tl.min(tl.where(draft == token, BLOCK, place), axis=0)
    tl.store(output + place, tl.where(place <= num_accepted, token, -1), mask=place <= num_drafts)


@triton.jit
def ragged_kernel(output, drafts, target, draft_start, width, BLOCK: tl.constexpr):
    """All requests, greedy."""
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
    """All requests, random."""
    request, place = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.load(draft_start + request)
    num_drafts = tl.load(draft_start + request + 1) - start
    draft = tl.load(drafts + start + place, mask=place < num_drafts, other=-1)
    there = draft >= 0
    p_draft = tl.load(p + (start + request + place) * vocab_size + draft, mask=there, other=0.0)
    q_draft = tl.load(q + (start + place) * vocab_size + draft, mask=there, other=1.0)
    uniform = tl.load(uniforms + start + place, mask=there, other=0.0)
    num_accepted = tl.min(tl.where(uniform * q_draft < p_draft, BLOCK, place), axis=0)
    last = tl.load(instead + start + request + num_accepted)
    token = tl.where(place < num_accepted, draft, tl.where(place == num_accepted, last, -1))
    tl.store(output + request * width + place, token, mask=place < width)
