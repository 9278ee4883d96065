"""Exact verification of drafts: which of them are accepted, and the model's own token after them.

Drafts go through the step's forward pass like any other tokens, so there are logits after the last known token and
after every draft, and the sampler has drawn from all of them. A draft is accepted if it equals the token drawn. At the
first mismatch the drawn token replaces the draft and the rest is dropped; if all are accepted, the last draw is a bonus
token.

This is the rejection rule of speculative sampling (arXiv 2211.17192) for a proposer that is certain of its draft x:
accept with probability p(x), else draw from p without x. One draw from p does both. And since a request's draws depend
only on its seed and the position, it generates the same tokens as without drafts.

In vLLM v0.33.0: `vllm/v1/sample/rejection_sampler.py` (`RejectionSampler`).
"""

from collections.abc import Sequence

import numpy as np


def kept_slices(drawn: Sequence[int], num_sampled: np.ndarray, drafts: Sequence[Sequence[int]]) -> list[slice]:
    """The drawn tokens to keep: one slice of `drawn` for each request.

    drawn [sum of num_sampled]: each request's draws, after its last known token and after each draft;
    `num_sampled` [requests] is 1 + len(drafts[i]).
    """
    starts = (np.cumsum(num_sampled) - num_sampled).tolist()
    return [
        slice(start, start + (num_accepted(theirs, drawn[start : start + len(theirs)]) if theirs else 0) + 1)
        for start, theirs in zip(starts, drafts, strict=True)
    ]


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Number of leading drafts that equal the tokens drawn at their positions."""
    for index, (draft, token_id) in enumerate(zip(drafts, drawn, strict=True)):
        if draft != token_id:
            return index
    return len(drafts)
