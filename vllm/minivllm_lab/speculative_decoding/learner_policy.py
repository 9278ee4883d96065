"""Plug the learner's functions of exercise 07 into the engine: the n-gram proposer and rejection
sampling.

LLM(model, parts=Parts(draft_proposer=proposer_of(propose_ngram),
rejection_sample=rejection_of(verify)), ...)
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from minivllm.config import SpeculativeConfig
from minivllm.errors import MinivllmError
from minivllm.kernels.noise import waiting_times
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.worker.input_batch import InputBatch

ProposeNgram = Callable[[list[int], int, int, int], list[int]]
"""`propose_ngram(token_ids, min_n, max_n, k)`, as exercise 07 describes it."""
Verify = Callable[[np.ndarray, np.ndarray, list[int], np.ndarray, np.ndarray], list[int]]
"""`verify(p, q, drafts, uniforms, noise)`, as exercise 07 describes it."""
SALT = 7


def proposer_of(propose_ngram: ProposeNgram) -> type:
    """Return an engine proposer class whose drafts come from `propose_ngram`.

    If it returns too many drafts, the engine's step raises `MinivllmError`.
    """

    class LearnerProposer:
        """An implementation of `minivllm.worker.spec_decode.proposer.Proposer`."""

        def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
            self.config, self.max_model_len = config, max_model_len

        def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
            return [self._drafts_after(batch.token_ids[row, : batch.num_tokens[row]].tolist()) for row in rows]

        def _drafts_after(self, token_ids: list[int]) -> list[int]:
            most = min(self.config.num_speculative_tokens, self.max_model_len - len(token_ids))
            if most <= 0:
                return []
            drafts = propose_ngram(token_ids, self.config.lookup_min, self.config.lookup_max, most)
            if len(drafts) > most:
                raise MinivllmError(f"your propose_ngram gives {len(drafts)} drafts, but at most {most} are allowed")
            return drafts

    return LearnerProposer


def rejection_of(verify: Verify) -> Callable[[RejectionArguments], torch.Tensor]:
    """Return a rejection sampler for the engine that calls `verify` for each request.

    Greedy requests get the engine's tokens; others get tokens of the same distribution. If `verify`
    returns a number of tokens that no step can have, the engine's step raises `MinivllmError`.
    """

    def rejection_sample(arguments: RejectionArguments) -> torch.Tensor:
        """Do the work of `minivllm.kernels.rejection_sample.rejection_sample`."""
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
            unsigned = (keys[rows].long() & 0xFFFFFFFF).tolist()
            uniforms = np.array([np.random.default_rng([SALT, *key]).random() for key in unsigned])
            tokens = verify(p, q, drafts.tolist(), uniforms[:count], noise[rows])
            if not 1 <= len(tokens) <= count + 1:
                raise MinivllmError(f"your verify returns {len(tokens)} tokens for {count} drafts")
            output[index, : len(tokens)] = torch.tensor([int(token) for token in tokens])
            first += count
        return output

    return rejection_sample


def _distribution(logits: torch.Tensor, greedy: bool) -> np.ndarray:
    """Return probabilities [rows, vocab]; for a greedy request, the most likely token has
    probability 1.
    """
    if greedy:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).double().numpy()
    return logits.double().softmax(-1).numpy()


def _certain(drafts: torch.Tensor, vocab: int) -> np.ndarray:
    """Return the probabilities [drafts, vocab] of a proposer that is certain: 1 at the draft; rows
    of draft -1 are all 0.
    """
    is_draft = (drafts >= 0)[:, None]
    return (F.one_hot(drafts.long().clamp(min=0), vocab) * is_draft).double().numpy()
