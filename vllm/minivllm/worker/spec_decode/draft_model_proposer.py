"""Drafting with a smaller model of the same vocabulary, an ordinary `Decoder`.

After each step of the target, the drafter first catches up, then drafts. To catch up, it computes
the same tokens, without rejected drafts and with the token that was sampled after them: now its
cache holds every token of the request, and its logits after the last one give the first draft. Each
further draft takes another pass, with one token for each request: the previous draft. The drafts'
keys and values go into the slots after the request's tokens, which the scheduler allocates as
lookahead; whatever is verified later overwrites them.

In vLLM v0.33.0: `vllm/v1/spec_decode/draft_model.py` (`DraftModelProposer`).
"""

import numpy as np
import torch

from minivllm.worker.input_batch import InputBatch, StepInputs, TokenSpans
from minivllm.worker.sample.gumbel import draft_keys, gumbel_max
from minivllm.worker.sample.sampler import Needs, most_likely
from minivllm.worker.spec_decode.model_proposer import ModelProposer
from minivllm.worker.step_buffers import PADDING_SLOT


class DraftModelProposer(ModelProposer):
    """A proposer that drafts greedily, or draws from the draft model's distribution at the
    request's temperature.
    """

    def propose(self, batch: InputBatch, inputs: StepInputs, num_drafts: int) -> list[list[int]]:
        """Implement `ModelProposer.propose`."""
        hidden = self._follow(batch, inputs)
        rows = inputs.rows[inputs.sampling]  # [n]
        if not len(rows):
            return []
        if not num_drafts:
            return [[] for _ in rows]
        drafts = [self._choose(hidden, batch, rows, 0)]
        for index in range(1, num_drafts):
            spans = self._place_of_draft(batch, rows, index - 1)
            hidden = self.model(drafts[-1], self._on_device(spans.positions), self.forward_context(spans))
            drafts.append(self._choose(hidden, batch, rows, index))
        return self._within_length(batch, rows, drafts)

    def _within_length(self, batch: InputBatch, rows: np.ndarray, drafts: list[torch.Tensor]) -> list[list[int]]:
        """Return each row's drafts, without those beyond the last position; `drafts` holds the ids
        [n] of each draft in turn.
        """
        room = np.maximum(self.max_model_len - batch.num_tokens[rows], 0)  # [n]
        table = torch.stack(drafts, dim=1).tolist()  # [n, num_drafts]
        return [token_ids[:most] for token_ids, most in zip(table, room.tolist(), strict=True)]

    def _follow(self, batch: InputBatch, inputs: StepInputs) -> torch.Tensor:
        """Compute the step's tokens and those sampled after them; return the hidden states [n,
        hidden] of the sampled ones.

        If no request has sampled, the result is a single row that is not used.
        """
        spans, last = self._computed_spans(batch, inputs, 0)
        token_ids, positions, rows = map(self._on_device, (spans.input_ids, spans.positions, last))
        return self.model(token_ids, positions, self.forward_context(spans), rows)

    def _computed_spans(self, batch: InputBatch, inputs: StepInputs, offset: int) -> tuple[TokenSpans, np.ndarray]:
        """Return the step's tokens without rejected drafts, and the indices [n] of the last token
        of each request that sampled.

        A request that sampled ends at its last known token, plus `offset`. If none did, the only
        index is 0.
        """
        starts = inputs.positions[inputs.query_start_loc[:-1]]  # [requests]
        ends = inputs.seq_lens.copy()  # [requests]
        ends[inputs.sampling] = batch.num_tokens[inputs.rows[inputs.sampling]] + offset
        spans = batch.spans(inputs.rows, starts, ends - starts)
        last = spans.query_start_loc[1:][inputs.sampling] - 1
        return spans, last if len(last) else np.zeros(1, np.int32)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _place_of_draft(self, batch: InputBatch, rows: np.ndarray, index: int) -> TokenSpans:
        """Return the spans in which draft `index` of each row is computed. A draft beyond the last
        position is not written to the cache.
        """
        places = batch.num_tokens[rows] + index  # [n]
        beyond = places >= self.max_model_len
        spans = batch.spans(rows, np.where(beyond, self.max_model_len - 1, places), np.ones(len(rows), np.int32))
        spans.slot_mapping[beyond] = PADDING_SLOT
        return spans

    def _choose(self, hidden: torch.Tensor, batch: InputBatch, rows: np.ndarray, index: int) -> torch.Tensor:
        """Choose draft `index` of each row from the hidden states [n, hidden]; return ids [n]."""
        logits = self.model.compute_logits(hidden).float()  # [n, vocab]
        token_ids = most_likely(logits)
        states = batch.sampling
        if self.draft_logits is None or not states.needs_of(rows) & Needs.RANDOM:
            return token_ids
        temperature = states.temperature[rows]  # [n]
        # Greedy rows are divided by 1.
        logits /= self._on_device(np.where(temperature > 0, temperature, 1)).unsqueeze(-1)
        # Kept for verification, which accepts a draft by p / q.
        self.draft_logits[self._on_device(rows), index] = logits
        places = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + index  # [n]
        drawn = gumbel_max(logits, draft_keys(states.seeds[rows], places))
        return torch.where(self._on_device(temperature > 0), drawn, token_ids)
