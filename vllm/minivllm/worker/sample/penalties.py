"""Penalties on tokens that have occurred before.

Only the logits of tokens that occur in a request are touched, so no tensor of vocabulary size is
built.

In vLLM v0.33.0: `vllm/v1/sample/ops/penalties.py`, `vllm/v1/worker/gpu/sample/penalties.py`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from minivllm.sampling_params import SamplingParams


def apply_penalties(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    prompt_token_ids: Sequence[np.ndarray],
    output_token_ids: Sequence[np.ndarray],
) -> None:
    """Apply repetition, frequency and presence penalties, in this order, to logits [rows, vocab],
    in place.

    The repetition penalty applies to tokens of prompt and output, the other two to those of the
    output only.
    """
    for row, (each, prompt, output) in enumerate(zip(params, prompt_token_ids, output_token_ids, strict=True)):
        if has_penalties(each):
            ids, counts = _occurring(prompt, output)
            ids, counts = torch.from_numpy(ids).to(logits.device), torch.from_numpy(counts).to(logits.device)
            logits[row, ids] = _penalized(logits[row, ids], counts, each)


def has_penalties(params: SamplingParams) -> bool:
    """Return whether any of the three penalties is set."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _occurring(prompt: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct token ids of a request, and how often each occurs in its output."""
    # Places: of each token, its index in ids.
    ids, places = np.unique(np.concatenate([prompt, output]), return_inverse=True)
    return ids.astype(np.int64), np.bincount(places[len(prompt) :], minlength=len(ids))


def _penalized(logits: torch.Tensor, counts: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    factor = params.repetition_penalty
    logits = torch.where(logits > 0, logits / factor, logits * factor)  # either way less likely
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
