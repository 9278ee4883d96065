"""Rejection sampling for the engine, request by request, by a function: the learner's `verify` of exercise 07.

LLM(model, parts=Parts(rejection_sample=rejection_that_asks(verify)), speculative_config={...})
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from minivllm.errors import MinivllmError
from minivllm.kernels.noise import waiting_times
from minivllm.kernels.rejection_arguments import RejectionArguments

Verify = Callable[[np.ndarray, np.ndarray, list[int], np.ndarray, np.ndarray], list[int]]
"""`verify(p, q, drafts, uniforms, noise)`, as exercise 07 describes it."""
SALT = 7


def rejection_that_asks(verify: Verify) -> Callable[[RejectionArguments], torch.Tensor]:
    """The engine's rejection sampling with `verify` deciding about each request.

    Greedy requests get the engine's tokens; others get tokens of the same distribution. Tokens that no step can have
    raise `MinivllmError` in the engine's step; the message says which.
    """

    def rejection_sample(arguments: RejectionArguments) -> torch.Tensor:
        """As `minivllm.kernels.rejection_sample.rejection_sample`."""
        target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys = arguments
        vocab, counts = target_logits.shape[1], num_drafts.tolist()
        output = torch.full((len(counts), max(counts, default=0) + 1), -1, dtype=torch.int64)
        noise = waiting_times(keys, vocab).double().numpy()
        first = 0  # of the request's drafts; its rows of logits begin `index` later
        for index, (count, greedy) in enumerate(zip(counts, is_greedy.tolist(), strict=True)):
            rows, places = slice(first + index, first + index + count + 1), slice(first, first + count)
            drafts = draft_token_ids[places]
            p = _distribution(target_logits[rows], greedy)
            q = _certain(drafts, vocab) if draft_logits is None else _distribution(draft_logits[places], greedy=False)
            uniforms = np.array([np.random.default_rng([SALT, *key]).random() for key in _unsigned(keys[rows])])
            tokens = verify(p, q, drafts.tolist(), uniforms[:count], noise[rows])
            if not 1 <= len(tokens) <= count + 1:
                raise MinivllmError(f"your verify gives {len(tokens)} tokens for {count} drafts")
            output[index, : len(tokens)] = torch.tensor([int(token) for token in tokens])
            first += count
        return output

    return rejection_sample


def _distribution(logits: torch.Tensor, greedy: bool) -> np.ndarray:
    """Probabilities [rows, vocab]; a greedy request's are 1 at the likeliest token."""
    if greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double().numpy()
    return logits.double().softmax(-1).numpy()


def _certain(drafts: torch.Tensor, vocab: int) -> np.ndarray:
    """Probabilities [drafts, vocab] of a proposer that is certain: 1 at the draft; 0 everywhere where it is -1."""
    there = (drafts >= 0)[:, None]
    return (F.one_hot(drafts.long().clamp(min=0), vocab) * there).double().numpy()


def _unsigned(keys: torch.Tensor) -> list[list[int]]:
    return (keys.long() & 0xFFFFFFFF).tolist()
