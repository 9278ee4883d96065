"""The worker's step: update the batch, gather its inputs, one forward pass for all of it, sample.

Prompts, chunks and decodes stand in one flat row of tokens; which is which, only the attention's tables know. Logits
are computed for those rows alone that sample. Of the ranks of a tensor-parallel group only rank 0 samples, and the
others are told: equal logits would give equal tokens, but that they are equal to the last bit need not be relied on.

In vLLM v0.33.0: `vllm/v1/worker/gpu/model_runner.py` (`GPUModelRunner.execute_model`, `sample_tokens`).
"""

import numpy as np
import torch

from minivllm.config import SpeculativeConfig
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.models.decoder import Decoder
from minivllm.sampling_params import SamplingParams
from minivllm.worker.cpu import pack_linears
from minivllm.worker.cuda_graphs import CudaGraphs, Record, capture_sizes
from minivllm.worker.input_batch import InputBatch, StepInputs, consecutive
from minivllm.worker.memory_profiling import allocate_kv_caches, check_kv_cache_dtype, refuse_beyond_memory
from minivllm.worker.paged_attention import AttentionMetadata, PagedAttention
from minivllm.worker.sample.prompt_logprobs import PromptLogprobs
from minivllm.worker.sample.sampler import NOTHING_NEEDED, SamplingMetadata, sample
from minivllm.worker.sample.states import SamplingStates
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer
from minivllm.worker.spec_decode.rejection_sampler import kept_slices


class ModelRunner:
    """A model on a device with its batch and its cache. Knows blocks and rows, nothing of queues and policies."""

    def __init__(
        self,
        model: Decoder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        kv_cache_dtype: str = "auto",
        speculative_config: SpeculativeConfig | None = None,
        attention_backend: str | None = None,
        use_kv_cache: bool = True,
    ) -> None:
        self.model = model
        self.config = model.config
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        self._packed_bytes = pack_linears(model)
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        check_kv_cache_dtype(kv_cache_dtype, self.device)
        refuse_beyond_memory(
            InputBatch.num_bytes(max_num_seqs, max_model_len, block_size),
            torch.device("cpu"),
            f"the batch of max_num_seqs = {max_num_seqs} requests of {max_model_len} tokens",
            "lower max_num_seqs",
        )
        self._batch_shape = max_num_seqs, max_model_len, block_size
        self.reset()
        self.attention_backend, self.use_kv_cache = attention_backend, use_kv_cache
        self.proposer = NgramProposer(speculative_config, max_model_len) if speculative_config else None
        self.attention: PagedAttention | None = None
        self.cuda_graphs: CudaGraphs | None = None

    def reset(self) -> None:
        """Forgets every request: rows, log probabilities of prompts, drafts."""
        self.batch = InputBatch(*self._batch_shape)
        self.prompt_logprobs = PromptLogprobs()
        self._draft_token_ids: dict[str, list[int]] = {}

    def weight_bytes(self) -> int:
        """Bytes of all parameters and tables, tied ones once, and of their packed forms."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) + self._packed_bytes

    def activation_peak(self, max_num_batched_tokens: int, max_num_seqs: int) -> int | None:
        """Bytes that the largest step needs beside weights and cache, measured; None where only a GPU could tell."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._dummy_step(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, once: `num_blocks` blocks in every layer."""
        where = self.device, self.dtype, self.kv_cache_dtype
        caches = allocate_kv_caches(self.config, num_blocks, self.block_size, *where)
        scale, window = self.config.head_dim**-0.5, self.config.sliding_window
        self.attention = PagedAttention(caches, scale, window, self.attention_backend)

    def capture_model(self, record: Record | None = None) -> None:
        """Captures the CUDA graphs of decode steps, once there is a cache; `record` as `CudaGraphs.capture`'s."""
        assert self.attention is not None
        max_num_seqs, max_model_len = self.batch.token_ids.shape
        self.cuda_graphs = CudaGraphs(
            self.model,
            self.attention,
            sizes=capture_sizes(max_num_seqs),
            max_num_blocks=self.batch.block_table.shape[1],
            max_model_len=max_model_len,
            block_size=self.block_size,
        )
        self.cuda_graphs.capture(record)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: what the scheduler decided in, what was sampled out."""
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput({})
        inputs = self.prepare_inputs(scheduler_output)
        hidden = self.forward(inputs)
        if self.model.group.rank > 0:
            self.prompt_logprobs.pass_over(inputs)
            return ModelRunnerOutput({})
        return self.sample_tokens(inputs, hidden)

    def take_sampled(self, sampled: dict[str, list[int]]) -> None:
        """Takes in what rank 0 sampled in this step, by request id."""
        rows = np.array([self.batch.row_of[req_id] for req_id in sampled])
        self.batch.append_tokens(rows, list(sampled.values()))

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Gathers the step's inputs from the batch, and sets the tables that attention will read, but for a graph."""
        assert self.attention is not None
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        if not self.use_kv_cache:
            num_scheduled_tokens = self.batch.forget_computed(num_scheduled_tokens)
        inputs = self.batch.prepare(num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens)
        if self._has_graph(inputs):
            return inputs
        self.attention.metadata = AttentionMetadata(
            self._on_device(inputs.query_start_loc),
            self._on_device(inputs.seq_lens),
            self._on_device(inputs.block_table),
            self._on_device(inputs.slot_mapping),
            int(inputs.seq_lens.max()),
        )
        return inputs

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [rows that sample, hidden]; of all tokens where some prompt's log probabilities are wanted.

        This is the part of a step that a CUDA graph replays, where there is one for it.
        """
        assert self.attention is not None
        if self.cuda_graphs is not None and self._has_graph(inputs):
            hidden = self.cuda_graphs.replay(inputs)
            all_sample = len(inputs.logits_indices) == len(hidden)
            return hidden if all_sample else hidden[self._on_device(inputs.logits_indices)]
        rows = None
        if len(inputs.logits_indices) < len(inputs.input_ids) and not self.prompt_logprobs:
            rows = self._on_device(inputs.logits_indices)
        return self.model(self._on_device(inputs.input_ids), self._on_device(inputs.positions), self.attention, rows)

    def sample_tokens(self, inputs: StepInputs, hidden: torch.Tensor) -> ModelRunnerOutput:
        """Samples for the requests that reached their last known token, and remembers what stays of it."""
        prompt_logprobs = {}
        if self.prompt_logprobs:
            prompt_logprobs = self.prompt_logprobs.observe(self.batch, inputs, hidden, self.model.compute_logits)
            hidden = hidden[self._on_device(inputs.logits_indices)]
        if not len(inputs.sampling):
            return ModelRunnerOutput({})
        logits = self.model.compute_logits(hidden).float()
        sampled = sample(logits, self._sampling_metadata(inputs))
        req_ids = [inputs.req_ids[index] for index in inputs.sampling]
        kept = kept_slices(sampled.token_ids, inputs.num_sampled, [inputs.drafts.get(req_id, ()) for req_id in req_ids])
        token_ids = {req_id: sampled.token_ids[which] for req_id, which in zip(req_ids, kept, strict=True)}
        logprobs = zip(req_ids, kept, strict=True) if sampled.logprobs else ()
        self.batch.append_tokens(inputs.rows[inputs.sampling], list(token_ids.values()))
        if self.proposer:
            self._draft_token_ids = self._propose(req_ids)
        return ModelRunnerOutput(
            token_ids,
            {req_id: sampled.logprobs[which] for req_id, which in logprobs if sampled.logprobs[which.start]},
            prompt_logprobs,
        )

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Drafts for what comes after the last step's tokens, by request id; once."""
        drafts, self._draft_token_ids = self._draft_token_ids, {}
        return drafts

    def _has_graph(self, inputs: StepInputs) -> bool:
        graphs = self.cuda_graphs
        return graphs is not None and not self.prompt_logprobs and graphs.size_for(inputs) is not None

    def _propose(self, req_ids: list[str]) -> dict[str, list[int]]:
        assert self.proposer is not None
        batch, drafts = self.batch, {}
        for req_id in req_ids:
            row = batch.row_of[req_id]
            drafts[req_id] = self.proposer.propose(batch.token_ids[row, : batch.num_tokens[row]])
        return {req_id: token_ids for req_id, token_ids in drafts.items() if token_ids}

    def _sampling_metadata(self, inputs: StepInputs) -> SamplingMetadata:
        batch, rows = self.batch, inputs.rows[inputs.sampling]
        if not batch.sampling.needs_of(rows):
            return NOTHING_NEEDED
        num_tokens = consecutive(batch.num_tokens[rows], inputs.num_sampled)
        rows = np.repeat(rows, inputs.num_sampled)
        return batch.sampling.metadata(rows, batch.token_ids, batch.num_prompt_tokens[rows], num_tokens)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self.prompt_logprobs.remove_request(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            self.prompt_logprobs.add_request(request)
        self.batch.update(scheduler_output)

    @torch.inference_mode()
    def _dummy_step(self, num_tokens: int, num_rows: int) -> None:
        """The largest step there can be, with a sampler that has everything to do, and attention left out."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        hidden = self.model(ids, ids, lambda layer, q, k, v: torch.zeros_like(q))
        logits = self.model.compute_logits(hidden[:num_rows]).float()
        states = SamplingStates(num_rows)
        for row in range(num_rows):
            states.add_request(row, SamplingParams(top_p=0.9, min_p=0.01))
        none = np.zeros((num_rows, 0), np.int32)
        sample(logits, states.metadata(np.arange(num_rows), none, np.zeros(num_rows, int), np.zeros(num_rows, int)))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
