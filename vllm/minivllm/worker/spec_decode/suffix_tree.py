"""Counts of all that has followed the last few tokens, in one sequence or in many: a suffix tree that grows by tokens.

vLLM v0.33.0 uses arctic-inference for this: in its v0.3.0, `csrc/suffix_decoding/suffix_tree.cc` (`SuffixTree`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minivllm.worker.spec_decode import suffix_loops as loops

SMALLEST = 64
"""Nodes and slots that an empty tree has room for beside those of one token."""
MANY_TOKENS = 4096
"""Fewer tokens of removed sequences than this are not worth giving their memory back."""


@dataclass(slots=True)
class SuffixDraft:
    """A continuation [n], how probable it is up to each of its tokens, the sum of that, and the length of the match."""

    token_ids: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class SuffixTree:
    """All suffixes of its sequences, up to `max_depth` tokens of each, with the number of times that each occurs.

    A sequence is an array that `start` returns and that the other methods take; it can grow at any time, as can others
    beside it. A token costs time in proportion to `max_depth`, and some 100 bytes.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._nodes = np.zeros((max_depth + SMALLEST, 9), np.int32)
        self._table = np.zeros(_table_size(len(self._nodes)), np.int32)
        self._text = np.zeros((SMALLEST, 2), np.int32)
        self._state = np.array([1, 0, 0, 1], np.int64)  # node 0 is the root, slot 0 is none
        self._sequences: dict[int, np.ndarray] = {}
        self._num_removed = 0

    @property
    def num_bytes(self) -> int:
        """Size of the tree's arrays."""
        return self._nodes.nbytes + self._table.nbytes + self._text.nbytes

    def start(self) -> np.ndarray:
        """A new sequence without tokens."""
        sequence = np.zeros((2, self.max_depth + 1), np.int32)
        self._sequences[id(sequence)] = sequence
        return sequence

    def extend(self, sequence: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends `token_ids` [n], int32, to a sequence."""
        while len(token_ids):
            done = loops.extend(token_ids, sequence, self._nodes, self._table, self._text, self._state)
            token_ids = token_ids[done:]
            if len(token_ids):
                self._make_room(len(token_ids))

    def remove(self, sequence: np.ndarray) -> None:
        """Removes a sequence and all that only it has."""
        del self._sequences[id(sequence)]
        self._num_removed += loops.remove(sequence, self._nodes, self._table, self._text, self._state)
        if self._num_removed > max(MANY_TOKENS, self._state[loops.TEXT_USED] // 2):
            self._compact()

    def speculate(
        self, context: np.ndarray, max_spec_tokens: int, max_spec_factor: float, min_token_prob: float
    ) -> SuffixDraft:
        """The best continuation of the last tokens of `context` [n], int32, of which the first is never matched.

        For each length of match it is the most frequent one: at most `max_spec_tokens` tokens and `max_spec_factor`
        times the length of the match, as long as its probability is at least `min_token_prob`. The best has the
        highest sum of probabilities.
        """
        tokens = np.empty((2, max(max_spec_tokens, 1)), np.int32)
        probs = np.empty(tokens.shape, np.float32)
        limits = max_spec_tokens, np.float32(max_spec_factor), np.float32(min_token_prob)
        arrays = self._nodes, self._table, self._text
        row, length, match_len, score = loops.speculate(context, *limits, *arrays, tokens, probs)
        return SuffixDraft(tokens[row, :length].tolist(), probs[row, :length].tolist(), float(score), int(match_len))

    def _make_room(self, num_tokens: int) -> None:
        """Doubles what is full, at least; most tokens take two nodes or fewer."""
        if self._state[loops.TEXT_USED] == len(self._text):
            self._text = _longer(self._text, num_tokens)
            return
        self._nodes = _longer(self._nodes, 2 * num_tokens + self.max_depth)
        self._table = np.zeros(_table_size(len(self._nodes)), np.int32)
        loops.rehash(self._nodes, self._table, self._state)

    def _compact(self) -> None:
        """Gives back the text of removed sequences, but for what labels still quote of it."""
        old, moved = self._text, np.zeros(len(self._text), np.int32)
        sequences = list(self._sequences.values())
        firsts = np.array([sequence[1, 0] for sequence in sequences], np.int32)
        kept = np.zeros_like(old)
        used = loops.copy_text(firsts, old, kept, moved)
        room = used + loops.num_orphans(self._nodes, moved, self._state)
        self._text = np.zeros((room + max(SMALLEST, used), 2), np.int32)
        self._text[:used] = kept[:used]
        self._state[loops.TEXT_USED] = used
        loops.move_labels(self._nodes, old, self._text, moved, self._state)
        for sequence in sequences:
            sequence[1] = moved[sequence[1]]
        self._num_removed = 0


def _longer(array: np.ndarray, least: int) -> np.ndarray:
    """The array with at least as many rows again, and at least `least` more, all zero."""
    return np.concatenate((array, np.zeros((max(len(array), least), array.shape[1]), array.dtype)))


def _table_size(num_nodes: int) -> int:
    """A power of two, so large that at least half of the table is empty."""
    return 1 << (2 * num_nodes - 1).bit_length()
