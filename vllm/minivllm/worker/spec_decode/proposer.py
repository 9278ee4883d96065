"""Proposers of draft tokens for the model to verify, chosen by the method in `speculative_config`."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer
from minivllm.worker.spec_decode.suffix_proposer import SuffixProposer


class Proposer(Protocol):
    """Proposes drafts after a step. They need not be right: the next step verifies all of them."""

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """Up to `num_speculative_tokens` drafts for each request that has just sampled; the list may be empty.

        Args:
            batch: `token_ids[row, : num_tokens[row]]` are a request's tokens, including those the step sampled. Who
                remembers anything of a request finds its name in `req_ids[row]`; it has ended, or was preempted, when
                it is no longer in `row_of`.
            rows: the rows of these requests [n], int64.
        """
        ...


PROPOSERS: dict[str, Callable[[SpeculativeConfig, int], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
}
"""Factories by method; each takes the settings and `max_model_len`, the length that drafts must not exceed."""


def make_proposer(config: SpeculativeConfig | None, max_model_len: int) -> Proposer | None:
    """The proposer for these settings; None if there are no settings."""
    return PROPOSERS[config.method](config, max_model_len) if config else None
