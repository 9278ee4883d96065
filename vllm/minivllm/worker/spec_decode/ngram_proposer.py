"""Drafts without a draft model: what followed the last tokens where they stood before.

Text repeats itself: names, calls, whole lines. The longest run of last tokens that occurs earlier in the request is
looked up, the first place where it does, and the tokens behind it are the drafts. Nothing is computed and nothing can
go wrong: the model verifies every draft.

In vLLM v0.33.0: `vllm/v1/spec_decode/ngram_proposer.py` (`NgramProposer`); the idea is Saxena's prompt lookup decoding.
"""

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch


class NgramProposer:
    """Looks the last `prompt_lookup_max` tokens up, then fewer, down to `prompt_lookup_min`."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """As `minivllm.worker.spec_decode.proposer.Proposer`."""
        return [self.drafts_after(batch.token_ids[row, : batch.num_tokens[row]]) for row in rows]

    def drafts_after(self, token_ids: np.ndarray) -> list[int]:
        """Drafts for what comes after `token_ids` [tokens], int32: none, or up to `num_speculative_tokens`."""
        room = self.max_model_len - len(token_ids)
        wanted = min(self.config.num_speculative_tokens, room)
        if wanted <= 0:
            return []
        text = token_ids.tobytes()
        for length in range(min(self.config.lookup_max, len(token_ids) - 1), self.config.lookup_min - 1, -1):
            place = _first_place(text, length * token_ids.itemsize, token_ids.itemsize)
            if place is not None:
                start = place // token_ids.itemsize + length
                return token_ids[start : start + wanted].tolist()
        return []


def _first_place(text: bytes, length: int, item: int) -> int | None:
    """Where the last `length` bytes of a text occur first, before its end; whole items only, of `item` bytes each.

    Searching bytes is what the C library does fastest; a place inside an item is none.
    """
    suffix, end = text[-length:], len(text) - item
    place = text.find(suffix, 0, end)
    while place % item > 0:  # -1 % item is not 0, so "not found" is looked at too
        if place < 0:
            return None
        place = text.find(suffix, place + 1, end)
    return place
