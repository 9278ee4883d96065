"""Drafting with an EAGLE-3 head, which reads the target's hidden states.

At position i, the head takes the target's hidden state of token i and the embedding of token i + 1,
which must be known. So after a step of the target, the head computes the same positions, except
those of rejected drafts: the token after the last one has just been sampled, or is the next one of
a prompt that is computed in chunks. Each further draft takes another pass, with one position for
each request, whose hidden state is what the head itself has just produced. The keys and values of
these positions are overwritten once the target has computed them.

A position's key depends on the token after it. So a prefix-cache hit leaves out the last block that
matches: in all others, the token after the last position also belongs to the request.

In vLLM v0.33.0: `vllm/v1/spec_decode/eagle.py` (`EagleProposer`),
`vllm/v1/worker/gpu/spec_decode/eagle/`.
"""

import numpy as np
import torch

from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import AuxHiddenStates
from minivllm.worker.input_batch import InputBatch, StepInputs, TokenSpans, consecutive
from minivllm.worker.spec_decode.draft_model_proposer import DraftModelProposer


class EagleProposer(DraftModelProposer):
    """A proposer like the draft model's, but one position behind it and reading hidden states."""

    model: Eagle3Head
    num_behind = 1
    _aux: AuxHiddenStates | None = None

    def aux_hidden_states(self) -> AuxHiddenStates:
        """Return a new container for the target's hidden states, which the head reads."""
        self._aux = AuxHiddenStates(self.model.eagle_config.aux_layer_ids)
        return self._aux

    def _pass(
        self, token_ids: torch.Tensor, spans: TokenSpans, before: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run the head over one draft of each request, which reads what it has itself produced at
        the position before.
        """
        return self.model(token_ids, self._on_device(spans.positions), before[1], self._forward_context(spans))

    def _follow(self, batch: InputBatch, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """Run the head over the step's positions, except those of rejected drafts; return its two
        outputs at each request's last position.

        Each is [n, hidden], for the requests that have sampled; if there are none, it has one row
        that is not used.
        """
        assert self._aux is not None
        aux = torch.cat(self._aux.states, dim=-1)  # [tokens, width]
        self._aux = None
        spans, last = self._computed_spans(batch, inputs)
        counts = np.diff(spans.query_start_loc)  # [requests]
        following = batch.token_ids[np.repeat(inputs.rows, counts), spans.positions + 1]  # [places]
        computed = consecutive(inputs.query_start_loc[:-1], counts)  # [places], in the target's step
        hidden = self.model.combine_hidden_states(aux[self._on_device(computed)])
        token_ids, positions, rows = map(self._on_device, (following, spans.positions, last))
        return self.model(token_ids, positions, hidden, self._forward_context(spans), rows)

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int) -> None:
        """Run the largest pass of the head, without attention: all of a step's tokens."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        width = len(self.model.eagle_config.aux_layer_ids) * self.model.config.hidden_size
        hidden = self.model.combine_hidden_states(torch.zeros(num_tokens, width, dtype=self.dtype, device=self.device))
        normed, _ = self.model(ids, ids, hidden, lambda layer, q, k, v: torch.zeros_like(q))
        self.model.compute_logits(normed[: self.max_num_seqs]).float()
