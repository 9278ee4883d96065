"""Drafts without a draft model: the tokens that followed an earlier occurrence of the last few
tokens.

Text repeats itself: names, calls, whole lines. The proposer takes the longest suffix that also
occurs earlier in the request, goes to its first occurrence, and proposes the tokens after it. No
model runs, and a wrong draft does no harm to the output, because the model verifies every draft.

In vLLM v0.33.0: `vllm/v1/spec_decode/ngram_proposer.py` (`NgramProposer`); the idea is Saxena's
prompt lookup decoding.
"""

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch


class NgramProposer:
    """A proposer that looks up the last `prompt_lookup_max` tokens, then fewer, down to
    `prompt_lookup_min`.
    """

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """Implement `minivllm.worker.spec_decode.proposer.Proposer`."""
        return [self.drafts_after(batch.token_ids[row, : batch.num_tokens[row]]) for row in rows]

    def drafts_after(self, token_ids: np.ndarray) -> list[int]:
        """Return drafts to follow `token_ids` [tokens], int32: at most `num_speculative_tokens`,
        possibly none.
        """
        room = self.max_model_len - len(token_ids)
        most = min(self.config.num_speculative_tokens, room)
        if most <= 0:
            return []
        text = token_ids.tobytes()
        # The longest suffix first.
        for length in range(min(self.config.lookup_max, len(token_ids) - 1), self.config.lookup_min - 1, -1):
            place = _first_place(text, length * token_ids.itemsize, token_ids.itemsize)
            if place is not None:
                start = place // token_ids.itemsize + length  # behind the earlier occurrence
                return token_ids[start : start + most].tolist()
        return []


def _first_place(text: bytes, length: int, item: int) -> int | None:
    """Return the byte offset of the first earlier occurrence of the last `length` bytes, or None if
    there is none.

    The offset is a multiple of `item` bytes: matches that start inside an item are skipped. Byte
    search is the fastest search available (C code).
    """
    suffix, end = text[-length:], len(text) - item
    place = text.find(suffix, 0, end)
    while place % item > 0:  # -1 % item is not 0, so "not found" enters the loop too
        if place < 0:
            return None
        place = text.find(suffix, place + 1, end)
    return place
