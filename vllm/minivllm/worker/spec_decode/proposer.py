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
from minivllm.worker.spec_decode.eagle_proposer import EagleProposer
from minivllm.worker.spec_decode.model_proposer import ModelProposer
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer


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


MakeProposer = Callable[[SpeculativeConfig, int], Proposer]
"""Takes the settings and `max_model_len`, the length that drafts must not exceed."""


PROPOSERS: dict[str, MakeProposer] = {"ngram": NgramProposer}
"""Factories of proposers that read tokens, by method."""
MODEL_PROPOSERS: dict[str, type[ModelProposer]] = {"draft_model": DraftModelProposer, "eagle3": EagleProposer}
"""Proposers that run a model, by method."""


def make_proposer(
    config: SpeculativeConfig | None, max_model_len: int, part: MakeProposer | None = None
) -> Proposer | None:
    """The proposer that reads tokens, made by `part` if one is given; None without settings, or if a model drafts."""
    if config is None or config.runs_model:
        return None
    return (part or PROPOSERS[config.method])(config, max_model_len)
