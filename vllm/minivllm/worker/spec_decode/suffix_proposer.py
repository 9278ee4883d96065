"""Drafts without a model from what followed the last tokens before, in this request and in earlier responses.

Agents, templates and retries say the same things again. Where an n-gram lookup takes the first occurrence, suffix
decoding counts all of them: it follows the most frequent continuation for as long as that is probable, and drafts more
the longer the match is.

In vLLM v0.33.0: `vllm/v1/spec_decode/suffix_decoding.py` (`SuffixDecodingProposer`), which calls arctic-inference
(`SuffixDecodingCache`); the method is that of arXiv 2411.04975.
"""

import numpy as np

from minivllm.config import SpeculativeConfig
from minivllm.worker.input_batch import InputBatch
from minivllm.worker.spec_decode.suffix_tree import SuffixDraft, SuffixTree


class SuffixDecodingCache:
    """A tree for each running request, of its prompt and its output, and one of all responses, also of ended requests.

    The last `max_cached_requests` responses are kept, by when they started; 0 keeps none.
    """

    def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self.responses = SuffixTree(max_tree_depth)
        self._active: dict[str, tuple[SuffixTree, np.ndarray]] = {}
        self._cached: dict[str, np.ndarray] = {}

    @property
    def active_requests(self) -> set[str]:
        """The requests that have started and not stopped."""
        return set(self._active)

    @property
    def cached_requests(self) -> list[str]:
        """The requests whose responses are kept, oldest first."""
        return list(self._cached)

    def start_request(self, req_id: str, prompt_token_ids: np.ndarray) -> None:
        """Begins with a prompt [n], int32. An earlier response of a request of this name is forgotten."""
        tree = SuffixTree(self.max_tree_depth)
        sequence = tree.start()
        tree.extend(sequence, prompt_token_ids)
        self._active[req_id] = tree, sequence
        if req_id in self._cached:
            self.responses.remove(self._cached.pop(req_id))
        if self.max_cached_requests:
            self._cached[req_id] = self.responses.start()
        if len(self._cached) > self.max_cached_requests:
            self.responses.remove(self._cached.pop(next(iter(self._cached))))

    def add_active_response(self, req_id: str, token_ids: np.ndarray) -> None:
        """Appends `token_ids` [n], int32, to a request's response."""
        tree, sequence = self._active[req_id]
        tree.extend(sequence, token_ids)
        if req_id in self._cached:
            self.responses.extend(self._cached[req_id], token_ids)

    def stop_request(self, req_id: str) -> None:
        """Drops a request's own tree. Its response stays."""
        del self._active[req_id]

    def speculate(
        self, req_id: str, context: np.ndarray, max_spec_tokens: int, max_spec_factor: float, min_token_prob: float
    ) -> SuffixDraft:
        """The better of two continuations: by the request's own tree, and by all responses. See `SuffixTree`."""
        limits = max_spec_tokens, max_spec_factor, min_token_prob
        context = context[-self.max_tree_depth :]
        own = self._active[req_id][0].speculate(context, *limits)
        others = self.responses.speculate(context, *limits)
        return own if own.score >= others.score else others


class SuffixProposer:
    """Drafts the most frequent continuation of the longest worthwhile match."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self.config, self.max_model_len = config, max_model_len
        self.cache = SuffixDecodingCache(
            config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
        )
        self._num_seen: dict[str, int] = {}

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """Implements `minivllm.worker.spec_decode.proposer.Proposer`.

        Requests that have left the batch are forgotten. One that comes back after a preemption starts again.
        """
        for req_id in self._num_seen.keys() - batch.row_of.keys():
            self.cache.stop_request(req_id)
            del self._num_seen[req_id]
        return [self._drafts_for(batch, row) for row in rows.tolist()]

    def _drafts_for(self, batch: InputBatch, row: int) -> list[int]:
        num_tokens = int(batch.num_tokens[row])
        room = self.max_model_len - num_tokens - 1  # for a token behind the last draft
        if room < 0:
            return []
        req_id, token_ids = batch.req_ids[row], batch.token_ids[row, :num_tokens]
        self._take_tokens(req_id, token_ids, int(batch.num_prompt_tokens[row]))
        config = self.config
        draft = self.cache.speculate(
            req_id,
            token_ids,
            min(config.num_speculative_tokens, room),
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        return draft.token_ids

    def _take_tokens(self, req_id: str, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        if req_id not in self._num_seen:
            self.cache.start_request(req_id, token_ids[:num_prompt_tokens])
            self._num_seen[req_id] = num_prompt_tokens
        self.cache.add_active_response(req_id, token_ids[self._num_seen[req_id] :])
        self._num_seen[req_id] = len(token_ids)
