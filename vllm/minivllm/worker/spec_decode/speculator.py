"""Speculation as the runner's steps see it: the interface of speculators, and the drafts until they
are verified.

In vLLM v0.33.0: `vllm/v1/worker/gpu/model_runner.py` (`GPUModelRunner.speculator`,
`GPUModelRunner.draft_tokens_handler`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from minivllm.config import ModelConfig
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.models.forward_context import AuxHiddenStates
from minivllm.worker.input_batch import InputBatch, StepInputs


class Speculator:
    """The interface of all speculators. This base class drafts nothing; it serves engines without
    speculation, and ranks that do not sample.
    """

    # The logits that drafts were drawn from, [max_num_seqs, num_speculative_tokens, vocab],
    # float32, divided by their request's temperature, by row of the batch; None if drafts are not
    # drawn.
    draft_logits: torch.Tensor | None = None

    @property
    def model_config(self) -> ModelConfig | None:
        """Return the drafting model's config, or None if no model drafts."""
        return None

    @property
    def kv_caches(self) -> Sequence[Any]:
        """Return the caches of the drafting model's layers."""
        return ()

    def num_bytes(self) -> int:
        """Return the bytes that drafting takes in memory, besides the cache."""
        return 0

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the drafting model's cache, with as many blocks as the target's. Called once."""

    def dummy_step(self, num_tokens: int) -> None:
        """Run the largest pass of a drafting model, without attention, to measure its memory."""

    def aux_hidden_states(self) -> AuxHiddenStates | None:
        """Return a container for the hidden states of the target's next pass, or None if they are
        not read.
        """
        return None

    def propose_draft_token_ids(
        self, batch: InputBatch, inputs: StepInputs, most: int | None = None
    ) -> dict[str, list[int]]:
        """Draft for the requests that sampled in this step, by request id.

        Each request gets at most `most` drafts; None means as many as the settings allow.
        """
        return {}


def by_req_id(inputs: StepInputs, drafts: list[list[int]]) -> dict[str, list[int]]:
    """Return, by request id, the drafts of the requests that sampled, given in their order; omit
    requests without drafts.
    """
    req_ids = [inputs.req_ids[index] for index in inputs.sampling]
    return {req_id: token_ids for req_id, token_ids in zip(req_ids, drafts, strict=True) if token_ids}


class DraftTokensHandler:
    """The drafts that follow the last step's tokens, by request id.

    The engine takes them and sends them back with the next step. With `keeps_drafts`, the engine is
    one step ahead and sends placeholders, which this rank replaces with its own drafts.
    `num_invalid_spec_tokens` counts each request's placeholders in the current step that had no
    draft.
    """

    def __init__(self, keeps_drafts: bool) -> None:
        self.keeps_drafts = keeps_drafts
        self.num_invalid_spec_tokens: dict[str, int] = {}
        self._draft_token_ids: dict[str, list[int]] = {}

    def put(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Store the drafts of a step."""
        self._draft_token_ids = draft_token_ids

    def take(self) -> dict[str, list[int]]:
        """Return the stored drafts, and clear them."""
        drafts, self._draft_token_ids = self._draft_token_ids, {}
        return drafts

    @property
    def kept(self) -> dict[str, list[int]]:
        """Return the last step's drafts, if they are kept for the next one."""
        return self._draft_token_ids if self.keeps_drafts else {}

    def scheduled(self, scheduler_output: SchedulerOutput) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Return how many tokens each request of a step has, and which of them are drafts.

        There may be fewer drafts than placeholders; then the request has fewer tokens in this step.
        """
        counts, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        self.num_invalid_spec_tokens = {}
        if not (self.keeps_drafts and drafts):
            return counts, drafts
        kept = self.take()
        placeholders = drafts
        drafts = {req_id: kept.get(req_id, [])[: len(unknown)] for req_id, unknown in placeholders.items()}
        missing = {req_id: len(placeholders[req_id]) - len(token_ids) for req_id, token_ids in drafts.items()}
        self.num_invalid_spec_tokens = missing
        # A placeholder without a draft is not a token of this step.
        counts = {req_id: count - missing.get(req_id, 0) for req_id, count in counts.items()}
        return counts, {req_id: token_ids for req_id, token_ids in drafts.items() if token_ids}
