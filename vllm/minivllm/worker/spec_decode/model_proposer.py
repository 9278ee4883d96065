"""The base class of all proposers that run a model, with its weights and a KV cache beside the
target's.

In vLLM v0.33.0: `vllm/v1/spec_decode/llm_base_proposer.py`;
`vllm/v1/worker/gpu/spec_decode/speculator.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import ForwardContext
from minivllm.models.linear import process_weights_after_loading, weight_bytes
from minivllm.worker.attention import without_attention
from minivllm.worker.input_batch import InputBatch, StepInputs, TokenSpans
from minivllm.worker.kv_cache import allocate_kv_caches, check_kv_cache_dtype
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import AttentionMetadata, PagedAttention
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.speculator import Speculator, by_req_id


class ModelProposer(Speculator, ABC):
    """A speculator that drafts with a model, which has a paged KV cache of its own.

    That cache uses the target's block ids, block tables and slots, and holds keys and values for
    the same tokens. So whatever the scheduler decides about a block (a request hits it, loses it,
    or gets another) is right for both caches, provided that the drafter computes every token that
    the target computes, in the same step.

    In a tensor-parallel group, only the rank that samples has a drafter, and it holds the whole
    model. Dividing a small model would save little and cost two all-reduces for each layer and
    draft; and the drafts have to come from one rank anyway.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        model: Decoder | Eagle3Head,
        make_attention: Callable[..., PagedAttention | PagedLatentAttention],
    ) -> None:
        self.settings = settings
        self.model = model
        self.make_attention = make_attention
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.max_num_seqs, self.max_model_len = settings.max_num_seqs, settings.max_model_len
        process_weights_after_loading(model)
        self.attention: PagedAttention | PagedLatentAttention | None = None
        check_kv_cache_dtype(settings.kv_cache_dtype, self.device, model.config)
        config = settings.speculative_config
        if config is not None and config.draft_sample_method == "probabilistic":
            shape = (self.max_num_seqs, config.num_speculative_tokens, model.config.vocab_size)
            # Rejection sampling needs q of every draft.
            self.draft_logits = torch.empty(shape, dtype=torch.float32, device=self.device)

    @abstractmethod
    def propose(self, batch: InputBatch, inputs: StepInputs, num_drafts: int) -> list[list[int]]:
        """Draft for the requests that have just sampled, `inputs.sampling`: up to `num_drafts` for
        each.

        Called after every step, whether or not any request has sampled.

        Args:
            batch: `token_ids[row, : num_tokens[row]]` are a request's tokens, including those the
                step sampled.
            inputs: what the target has just computed; rejected drafts are among these tokens.
            num_drafts: the maximum for each request, 0 to `num_speculative_tokens`.
        """

    def propose_draft_token_ids(
        self, batch: InputBatch, inputs: StepInputs, most: int | None = None
    ) -> dict[str, list[int]]:
        """Draft for the requests that sampled. The model runs even if `most` is 0, since its KV
        cache must not fall behind.
        """
        num_drafts = self.settings.num_speculative_tokens if most is None else most
        return by_req_id(inputs, self.propose(batch, inputs, num_drafts))

    @property
    def model_config(self) -> ModelConfig:
        """Return the drafting model's config."""
        return self.model.config

    @property
    def kv_caches(self) -> Sequence[Any]:
        """Return the caches of the drafting model's layers."""
        return self.attention.kv_caches if self.attention else ()

    def num_bytes(self) -> int:
        """Return the bytes of the drafter's parameters and tables, and of the draft logits that it
        keeps.
        """
        return weight_bytes(self.model) + (0 if self.draft_logits is None else self.draft_logits.nbytes)

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the drafter's cache."""
        config = self.model.config
        where = (self.device, self.dtype, self.settings.kv_cache_dtype)
        caches = allocate_kv_caches(config, num_blocks, self.settings.block_size, *where)
        self.attention = self.make_attention(config, caches)

    @torch.inference_mode()
    def dummy_step(self, num_tokens: int) -> None:
        """Run the largest pass, without attention: a whole step's tokens, and one more for each
        request.
        """
        # The target's tokens, and the sampled ones.
        ids = torch.zeros(num_tokens + self.max_num_seqs, dtype=torch.int64, device=self.device)
        hidden = self.model(ids, ids, without_attention(self.model.config, self.max_model_len))
        self.model.compute_logits(hidden[: self.max_num_seqs]).float()

    def forward_context(self, spans: TokenSpans) -> ForwardContext:
        """Return the context of a forward pass of the drafter over these tokens."""
        assert self.attention is not None
        return ForwardContext(self.attention.of_step(AttentionMetadata.of(spans, self.device)))


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
