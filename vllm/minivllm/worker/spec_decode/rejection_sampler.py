"""Exact verification of drafts: which of them stay, and the token that the model says itself.

Each draft stands in the step's forward pass like any other token, so there are logits behind the last known token and
behind every draft, and the sampler has drawn from all of them. A draft is accepted where it is what was drawn. At the
first that is not, the drawn token takes its place and the rest is dropped; where all are accepted, the last draw is one
token more.

That is the rejection rule of speculative sampling (arXiv 2211.17192) for a proposer that is certain of its draft x:
accept with probability p(x), else draw from p without x. One draw from p does both. And since a request's draws depend
on its seed and the position alone, its tokens are those that it would have had without drafts.

In vLLM v0.33.0: `vllm/v1/sample/rejection_sampler.py` (`RejectionSampler`).
"""

from collections.abc import Sequence

import numpy as np


def kept_slices(drawn: Sequence[int], num_sampled: np.ndarray, drafts: Sequence[Sequence[int]]) -> list[slice]:
    """What stays of the tokens drawn: one slice of `drawn` for each request.

    drawn [sum of num_sampled]: each request's draws, behind its last known token and behind each draft;
    `num_sampled` [requests] is 1 + len(drafts[i]).
    """
    starts = (np.cumsum(num_sampled) - num_sampled).tolist()
    return [
        slice(start, start + (num_accepted(theirs, drawn[start : start + len(theirs)]) if theirs else 0) + 1)
        for start, theirs in zip(starts, drafts, strict=True)
    ]


def num_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drafts, from the first on, are what was drawn in their place."""
    for index, (draft, token_id) in enumerate(zip(drafts, drawn, strict=True)):
        if draft != token_id:
            return index
    return len(drafts)
