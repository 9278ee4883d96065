"""Drafts accepted at given rates, whatever the model says of them: for experiments on speed.

How much speculation gains at an acceptance of, say, 0.7 is then measured without a drafter that happens to reach it.
The price is the text: accepted drafts are not what the model would have said. Nothing else is lossy in this package.

In vLLM v0.33.0: `rejection_sample_method="synthetic"` of `vllm/v1/sample/rejection_sampler.py`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from minivllm.worker.sample.gumbel import row_keys
from minivllm.worker.sample.sampler import SamplerOutput, SamplingMetadata, add_logprobs, raw_logprobs_of, sample
from minivllm.worker.spec_decode.rejection_sampler import StepDrafts

SALT = np.uint64(0x5EED_0ACC_E97A_9CE5)
"""Changes the seeds, so that whether a draft is accepted does not depend on which token is drawn after it."""


def sample_at_rates(
    logits: torch.Tensor, metadata: SamplingMetadata, drafts: StepDrafts, rates: Sequence[float]
) -> SamplerOutput:
    """As `sample_with_drafts`, but draft i is accepted with probability `rates[i]` if all drafts before it were.

    What decides is a hash of the request's seed and the position. `metadata` must have seeds, for greedy rows too.
    """
    raw_logprobs = raw_logprobs_of(logits, metadata)
    drawn = sample(logits, metadata)
    seeds, positions = metadata.seeds ^ SALT, metadata.num_output_tokens
    chances = row_keys(seeds, positions)[:, 0] * 2.0**-32  # [sum of (num_drafts + 1)], from 0 up to 1
    token_ids, start = np.full(len(logits), -1, np.int64), 0
    for number, theirs in zip(drafts.num_drafts.tolist(), split(drafts), strict=True):
        kept = int(np.logical_and.accumulate(chances[start : start + number] < rates[:number]).sum())
        token_ids[start : start + kept] = theirs[:kept]
        token_ids[start + kept] = drawn.token_ids[start + kept]
        start += number + 1
    output = SamplerOutput(token_ids.tolist(), drawn.largest)
    add_logprobs(output, raw_logprobs, metadata)
    return output


def split(drafts: StepDrafts) -> list[np.ndarray]:
    """The drafts of each request."""
    return np.split(drafts.token_ids, np.cumsum(drafts.num_drafts)[:-1])
