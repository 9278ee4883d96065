"""Who drafts tokens for the model to verify, chosen by the method of `speculative_config`."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer


class Proposer(Protocol):
    """Drafts after a step. What a proposer says need not be right: the next step verifies all of it."""

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """Up to `num_speculative_tokens` drafts for each of the requests that have just sampled; none is an empty list.

        Args:
            batch: `token_ids[row, : num_tokens[row]]` are a request's tokens, with those that the step has sampled.
            rows: the rows of these requests [n], int64.
        """
        ...


PROPOSERS: dict[str, Callable[[SpeculativeConfig, int], Proposer]] = {"ngram": NgramProposer}
"""By method: what makes a proposer, of the settings and `max_model_len`, beyond which nothing may be drafted."""


def make_proposer(config: SpeculativeConfig | None, max_model_len: int) -> Proposer | None:
    """The proposer of these settings; None without any."""
    return PROPOSERS[config.method](config, max_model_len) if config else None
