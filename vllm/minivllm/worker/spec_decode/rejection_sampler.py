"""Sampling in a step with drafts: which of them are accepted, and the model's own token after them.

Drafts go through the step's forward pass like any other tokens, so there are logits after a
request's last known token and after each of its drafts. They pass through the same processors as in
a step without drafts. Then `kernels/rejection_sample.py` replaces the draw, by the rule of
speculative sampling (arXiv 2211.17192): the output has the same distribution as without drafts. For
greedy requests, and where the proposer is certain of its draft, it is even the same token, since a
draw depends only on the request's seed and the position.

In vLLM v0.33.0: `vllm/v1/sample/rejection_sampler.py` (`RejectionSampler`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.platforms.device import on_device
from minivllm.worker.input_batch import InputBatch, StepInputs, consecutive
from minivllm.worker.sample.gumbel import row_keys
from minivllm.worker.sample.sampler import (
    Needs,
    SamplerOutput,
    SamplingMetadata,
    add_logprobs,
    apply_constraints,
    argmax,
    raw_logprobs_of,
    tempered,
)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of the requests that sample in a step.

    - `token_ids` [sum of num_drafts], int32, one request after another; `num_drafts` [requests],
      int32.
    - `logits` [sum of num_drafts, vocab], float32, on the device: what random requests' drafts were
      drawn from; None if they were not drawn.
    """

    token_ids: np.ndarray
    num_drafts: np.ndarray
    logits: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: InputBatch, inputs: StepInputs, draft_logits: torch.Tensor | None) -> "StepDrafts":
        """Return the drafts of a step, read from the batch; `draft_logits` has the layout of
        `Speculator.draft_logits`.
        """
        rows = inputs.rows[inputs.sampling]  # [n]
        num_drafts = inputs.num_sampled - 1  # [n]
        row_of = np.repeat(rows, num_drafts)
        places = consecutive(np.zeros(len(rows), np.int64), num_drafts)
        token_ids = batch.token_ids[row_of, np.repeat(batch.num_tokens[rows], num_drafts) + places]
        if draft_logits is not None:
            draft_logits = draft_logits[tuple(on_device(index, draft_logits.device) for index in (row_of, places))]
        return cls(token_ids, num_drafts.astype(np.int32), draft_logits)


def sample_with_drafts(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    drafts: StepDrafts,
    rejection_sample: Callable[[RejectionArguments], torch.Tensor] = rejection_sample,
) -> SamplerOutput:
    """Sample a token for each row of logits, up to the last one that its request keeps; the rows
    after it get -1.

    logits [sum of (num_drafts + 1), vocab], float32, is overwritten; `metadata` has as many rows.
    """
    largest = argmax(logits)[1].cpu().numpy()
    raw_logprobs = raw_logprobs_of(logits, metadata)
    apply_constraints(logits, metadata)
    widths = drafts.num_drafts + 1  # [requests]
    is_greedy = np.ones(len(widths), bool)
    keys = np.zeros((len(logits), 2), np.uint32)
    if metadata.needs & Needs.RANDOM:  # else no key is used
        # All rows of a request are alike; its last one tells.
        is_greedy = metadata.values["temperature"][np.cumsum(widths) - 1] <= 0.0
        keys = row_keys(metadata.values["seed"], metadata.num_output_tokens)
        random_rows = np.flatnonzero(metadata.values["temperature"] > 0.0)
        changed = tempered(logits, random_rows, metadata)
        if changed is not logits:
            logits[torch.from_numpy(random_rows).to(logits.device)] = changed
    arguments = RejectionArguments(
        target_logits=logits,
        draft_token_ids=torch.from_numpy(drafts.token_ids),
        num_drafts=torch.from_numpy(drafts.num_drafts),
        draft_logits=drafts.logits if metadata.needs & Needs.RANDOM else None,
        is_greedy=torch.from_numpy(is_greedy),
        keys=torch.from_numpy(keys.view(np.int32)),
    )
    table = rejection_sample(arguments)
    token_ids = table.cpu().numpy()  # [requests, most drafts + 1]
    token_ids = token_ids[np.arange(token_ids.shape[1]) < widths[:, None]]  # [sum of widths]
    output = SamplerOutput(token_ids.tolist(), largest)
    add_logprobs(output, raw_logprobs, metadata)
    return output
