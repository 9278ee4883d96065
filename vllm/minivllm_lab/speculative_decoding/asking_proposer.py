"""A proposer for the engine that leaves every draft to a function: the learner's `propose_ngram` of exercise 07.

LLM(model, parts=Parts(draft_proposer=proposer_that_asks(propose_ngram)), speculative_config={...})
"""

from collections.abc import Callable

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.errors import MinivllmError
from minivllm.worker.input_batch import InputBatch

ProposeNgram = Callable[[list[int], int, int, int], list[int]]
"""`propose_ngram(token_ids, min_n, max_n, k)`, as exercise 07 describes it."""


def proposer_that_asks(propose_ngram: ProposeNgram) -> type:
    """The engine's n-gram proposer with `propose_ngram` finding the drafts.

    Drafts that are none raise `MinivllmError` in the engine's step; the message says which.
    """

    class AskingProposer:
        """Implements `minivllm.worker.spec_decode.proposer.Proposer`."""

        def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
            self.config, self.max_model_len = config, max_model_len

        def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
            return [self._drafts_after(batch.token_ids[row, : batch.num_tokens[row]].tolist()) for row in rows]

        def _drafts_after(self, token_ids: list[int]) -> list[int]:
            wanted = min(self.config.num_speculative_tokens, self.max_model_len - len(token_ids))
            if wanted <= 0:
                return []
            drafts = propose_ngram(token_ids, self.config.lookup_min, self.config.lookup_max, wanted)
            if len(drafts) > wanted:
                raise MinivllmError(f"your propose_ngram gives {len(drafts)} drafts, and {wanted} were asked for")
            return drafts

    return AskingProposer
