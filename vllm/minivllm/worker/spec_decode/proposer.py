"""Proposers of draft tokens for the model to verify, chosen by the method in `speculative_config`.

There are two kinds. A `Proposer` reads the requests' tokens and nothing else. A `ModelProposer` runs a model of its own
over the tokens that the target model has just computed, and then once for each further draft.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.spec_decode.draft_model_proposer import DraftModelProposer
from minivllm.worker.spec_decode.model_proposer import ModelProposer
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
"""Factories of proposers that read tokens, by method; each takes the settings and `max_model_len`, the length that
drafts must not exceed."""

MODEL_PROPOSERS: dict[str, type[ModelProposer]] = {"draft_model": DraftModelProposer}
"""Proposers that run a model, by method."""


def make_proposer(config: SpeculativeConfig | None, max_model_len: int) -> Proposer | None:
    """The proposer that reads tokens, for these settings; None without settings, or if they name one with a model."""
    return PROPOSERS[config.method](config, max_model_len) if config and not config.runs_model else None
