"""Proposers of draft tokens for the model to verify, chosen by the method in `speculative_config`.

There are two kinds. A `Proposer` reads the requests' tokens and nothing else. A `DraftModelProposer`
runs a model of its own over the tokens that the target model has just computed, and then once for
each further draft.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from minivllm.config import ModelConfig, SpeculativeConfig
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head
from minivllm.worker.input_batch import InputBatch, StepInputs
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import PagedAttention
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.draft_model_proposer import DraftModelProposer
from minivllm.worker.spec_decode.eagle_proposer import EagleProposer
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer
from minivllm.worker.spec_decode.speculator import Speculator, by_req_id


class Proposer(Protocol):
    """The interface of proposers that read only tokens. Drafts need not be right: the next step
    verifies all of them.
    """

    def propose(self, batch: InputBatch, rows: np.ndarray) -> list[list[int]]:
        """Propose up to `num_speculative_tokens` drafts for each request that has just sampled,
        possibly none.

        Args:
            batch: `token_ids[row, : num_tokens[row]]` are a request's tokens, including those the
                step sampled. A proposer with state of its own finds the request's id in
                `req_ids[row]`; the request has ended, or was preempted, when it is no longer in
                `row_of`.
            rows: the rows of these requests [n], int64.
        """
        ...


# Factories of proposers that read tokens, by method: of the settings and `max_model_len`, which drafts
# must not exceed.
PROPOSERS: dict[str, Callable[[SpeculativeConfig, int], Proposer]] = {"ngram": NgramProposer}
# Proposers that run a model, by method.
MODEL_PROPOSERS: dict[str, type[DraftModelProposer]] = {"draft_model": DraftModelProposer, "eagle3": EagleProposer}


class TokenSpeculator(Speculator):
    """A speculator that drafts with a `Proposer`, which it calls only if there is something to
    draft.
    """

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    def propose_draft_token_ids(
        self, batch: InputBatch, inputs: StepInputs, most: int | None = None
    ) -> dict[str, list[int]]:
        """Draft from the requests' tokens alone, unless `most` is 0."""
        if most == 0:
            return {}
        drafts = self.proposer.propose(batch, inputs.rows[inputs.sampling])
        return by_req_id(inputs, [token_ids[:most] for token_ids in drafts])


def make_speculator(
    settings: WorkerSettings,
    target: Decoder,
    draft_model: Decoder | Eagle3Head | None,
    make_attention: Callable[..., PagedAttention | PagedLatentAttention],
) -> Speculator:
    """Return the speculator of this rank; only the rank that samples drafts, and only it has a
    `draft_model`.

    Raises:
        MinivllmError: the draft model does not fit the target.
    """
    config = settings.speculative_config
    if config is None or not target.group.samples:
        return Speculator()
    if draft_model is not None:
        check_drafter(draft_model.config, target.whole_config, settings.max_model_len)
        return MODEL_PROPOSERS[config.method](settings, draft_model, make_attention)
    make_proposer = settings.draft_proposer or PROPOSERS[config.method]
    return TokenSpeculator(make_proposer(config, settings.max_model_len))


def check_drafter(drafter: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    """Reject a draft model whose vocabulary is not the target's, or that does not support
    `max_model_len` tokens.

    Raises:
        MinivllmError: its vocabulary has another size, or `max_model_len` exceeds what it was
            made for.
    """
    if drafter.vocab_size != target.vocab_size:
        raise MinivllmError(
            f"the draft model has a vocabulary of {drafter.vocab_size} tokens, but the model has {target.vocab_size}: "
            "both must have the same tokens"
        )
    if drafter.max_position_embeddings and drafter.max_position_embeddings < max_model_len:
        raise MinivllmError(
            f"the draft model supports at most {drafter.max_position_embeddings} tokens: lower max_model_len from "
            f"{max_model_len} to that or less"
        )
