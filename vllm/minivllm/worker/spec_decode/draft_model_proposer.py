"""Drafting with a smaller model of the same vocabulary, an ordinary `Decoder`.

After each step of the target, the drafter first catches up, then drafts. To catch up, it computes
the same tokens, without rejected drafts and with the token that was sampled after them: now its
cache holds every token of the request, and its logits after the last one give the first draft. Each
further draft takes another pass, with one token for each request: the previous draft. The drafts'
keys and values go into the slots after the request's tokens, which the scheduler allocates as
lookahead; whatever is verified later overwrites them.

The drafter's cache uses the target's block ids, block tables and slots, and holds keys and values
for the same tokens. So whatever the scheduler decides about a block (a request hits it, loses it, or
gets another) is right for both caches, provided that the drafter computes every token that the
target computes, in the same step.

In a tensor-parallel group, only the rank that samples has a drafter, and it holds the whole model.
Dividing a small model would save little and cost two all-reduces for each layer and draft; and the
drafts have to come from one rank anyway.

In vLLM v0.33.0: `vllm/v1/spec_decode/draft_model.py` (`DraftModelProposer`),
`vllm/v1/spec_decode/llm_base_proposer.py`, `vllm/v1/worker/gpu/spec_decode/speculator.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from minivllm.config import ModelConfig
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import ForwardContext
from minivllm.models.linear import process_weights_after_loading, weight_bytes
from minivllm.worker.attention import without_attention
from minivllm.worker.input_batch import InputBatch, StepInputs, TokenSpans
from minivllm.worker.kv_cache import allocate_kv_caches, check_kv_cache_dtype
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import AttentionMetadata, PagedAttention
from minivllm.worker.sample.gumbel import draft_keys, gumbel_max
from minivllm.worker.sample.sampler import Needs, argmax
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.speculator import Speculator, by_req_id
from minivllm.worker.step_buffers import PADDING_SLOT


class DraftModelProposer(Speculator):
    """A proposer that drafts greedily, or draws from the draft model's distribution at the
    request's temperature.
    """

    num_behind = 0
    """How many positions the drafter lags behind the request's last token."""

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

    def propose_draft_token_ids(
        self, batch: InputBatch, inputs: StepInputs, most: int | None = None
    ) -> dict[str, list[int]]:
        """Draft for the requests that sampled. The model runs even if there are none, or if `most`
        is 0, since its KV cache must not fall behind.
        """
        outputs = self._follow(batch, inputs)
        rows = inputs.rows[inputs.sampling]  # [n]
        num_drafts = self.settings.num_speculative_tokens if most is None else most
        if not len(rows) or not num_drafts:
            return {}
        drafts = [self._choose(outputs[0], batch, rows, 0)]
        for index in range(1, num_drafts):
            spans = self._place_of_draft(batch, rows, index - 1 - self.num_behind)
            outputs = self._pass(drafts[-1], spans, outputs)
            drafts.append(self._choose(outputs[0], batch, rows, index))
        return by_req_id(inputs, self._within_length(batch, rows, drafts))

    def _pass(
        self, token_ids: torch.Tensor, spans: TokenSpans, before: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run the drafter over one draft of each request; return its outputs, first the hidden
        states [n, hidden] that the next drafts are chosen from. `before` are those of its last pass.
        """
        return (self.model(token_ids, self._on_device(spans.positions), self._forward_context(spans)),)

    def _forward_context(self, spans: TokenSpans) -> ForwardContext:
        assert self.attention is not None
        return ForwardContext(self.attention.of_step(AttentionMetadata.of(spans, self.device)))

    def _within_length(self, batch: InputBatch, rows: np.ndarray, drafts: list[torch.Tensor]) -> list[list[int]]:
        """Return each row's drafts, without those beyond the last position; `drafts` holds the ids
        [n] of each draft in turn.
        """
        room = np.maximum(self.max_model_len - batch.num_tokens[rows], 0)  # [n]
        table = torch.stack(drafts, dim=1).tolist()  # [n, num_drafts]
        return [token_ids[:most] for token_ids, most in zip(table, room.tolist(), strict=True)]

    def _follow(self, batch: InputBatch, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        """Compute the step's tokens and those sampled after them; return the outputs of `_pass` for
        the sampled ones.

        If no request has sampled, the result is a single row that is not used.
        """
        spans, last = self._computed_spans(batch, inputs)
        token_ids, positions, rows = map(self._on_device, (spans.input_ids, spans.positions, last))
        return (self.model(token_ids, positions, self._forward_context(spans), rows),)

    def _computed_spans(self, batch: InputBatch, inputs: StepInputs) -> tuple[TokenSpans, np.ndarray]:
        """Return the step's tokens without rejected drafts, and the indices [n] of the last token
        of each request that sampled.

        A request that sampled ends at its last known token, or `num_behind` before it. If none did,
        the only index is 0.
        """
        starts = inputs.positions[inputs.query_start_loc[:-1]]  # [requests]
        ends = inputs.seq_lens.copy()  # [requests]
        ends[inputs.sampling] = batch.num_tokens[inputs.rows[inputs.sampling]] - self.num_behind
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
        token_ids, _ = argmax(logits)
        states = batch.sampling
        if self.draft_logits is None or not states.needs_of(rows) & Needs.RANDOM:
            return token_ids
        temperature = states.values["temperature"][rows]  # [n]
        # Greedy rows are divided by 1.
        logits /= self._on_device(np.where(temperature > 0, temperature, 1)).unsqueeze(-1)
        # Kept for verification, which accepts a draft by p / q.
        self.draft_logits[self._on_device(rows), index] = logits
        places = batch.num_tokens[rows] - batch.num_prompt_tokens[rows] + index  # [n]
        drawn = gumbel_max(logits, draft_keys(states.values["seed"][rows], places))
        return torch.where(self._on_device(temperature > 0), drawn, token_ids)
