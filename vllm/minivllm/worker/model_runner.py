"""The worker's step: update the batch, gather its inputs, run one forward pass over all of it, sample.

Prefills, chunks and decodes share one flat row of tokens; only the attention metadata tells them apart. Logits are
computed only for the rows that sample. In a tensor-parallel group only rank 0 samples and broadcasts the result:
identical logits would give identical tokens, but ranks need not agree to the last bit.

In vLLM v0.33.0: `vllm/v1/worker/gpu/model_runner.py` (`GPUModelRunner.execute_model`, `sample_tokens`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from minivllm.config import LoRAConfig, SpeculativeConfig
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.output import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.kernels.grammar_bitmask import apply_grammar_bitmask
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import AuxHiddenStates, ForwardContext
from minivllm.models.linear import process_weights_after_loading, weight_bytes
from minivllm.platforms.device import on_device
from minivllm.platforms.device_memory import refuse_beyond_memory
from minivllm.platforms.profiling import record_function_or_nullcontext
from minivllm.sampling_params import SamplingParams
from minivllm.worker.attention import make_attention, without_attention
from minivllm.worker.cuda_graphs import CudaGraphs, Record, captured, cuda_recorder
from minivllm.worker.input_batch import InputBatch, StepInputs, consecutive
from minivllm.worker.kv_cache import allocate_kv_caches, check_kv_cache_dtype
from minivllm.worker.kv_connector_runner import KVConnectorRunner, tensors_of
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import AttentionMetadata, PagedAttention
from minivllm.worker.sample.prompt_logprobs import PromptLogprobs
from minivllm.worker.sample.sampler import NOTHING_NEEDED, ON_DEVICE, SamplingMetadata, choose, sample
from minivllm.worker.sample.states import SamplingStates
from minivllm.worker.spec_decode.model_proposer import ModelProposer, check_drafter
from minivllm.worker.spec_decode.proposer import MODEL_PROPOSERS, MakeProposer, make_proposer
from minivllm.worker.spec_decode.rejection_sampler import RejectionSample, StepDrafts, sample_with_drafts
from minivllm.worker.step_output import fill_in, kept_of, nonfinite_req_ids, num_invalid_of
from minivllm.worker.tokens_in_flight import TokensInFlight


class ModelRunner:
    """A model on a device with its batch and its cache. It knows blocks and rows, but no queues or policies."""

    def __init__(
        self,
        model: Decoder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        kv_cache_dtype: str = "auto",
        speculative_config: SpeculativeConfig | None = None,
        drafter: Decoder | Eagle3Head | None = None,
        attention_backend: str | None = None,
        attention: Callable[..., PagedAttention] | None = None,
        draft_proposer: MakeProposer | None = None,
        rejection_sample: RejectionSample = rejection_sample,
        use_kv_cache: bool = True,
        async_scheduling: bool = False,
        lora_config: LoRAConfig | None = None,
        lora_slots: Callable[..., Any] | None = None,
        max_num_batched_tokens: int = 0,
    ) -> None:
        self.model = model
        self.config = model.config
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        process_weights_after_loading(model)
        self.max_num_seqs, self.max_model_len, self.block_size = max_num_seqs, max_model_len, block_size
        self.kv_cache_dtype = kv_cache_dtype
        check_kv_cache_dtype(kv_cache_dtype, self.device, self.config)
        refuse_beyond_memory(
            InputBatch.num_bytes(max_num_seqs, max_model_len, block_size),
            torch.device("cpu"),
            f"the batch of max_num_seqs = {max_num_seqs} requests of {max_model_len} tokens",
            "lower max_num_seqs",
        )
        self.use_kv_cache = use_kv_cache
        self.keeps_drafts = async_scheduling
        self.defers_tokens = False
        """Whether steps end before their tokens are on the host, if these are not needed there (`tokens_in_flight`)."""
        self.make_attention = partial(make_attention, backend=attention_backend, attention=attention)
        samples = model.group.samples
        self.proposer = make_proposer(speculative_config, max_model_len, draft_proposer) if samples else None
        self.drafter = None if drafter is None else self._model_proposer(speculative_config, drafter)
        self.rejection_sample = rejection_sample
        self.attention: PagedAttention | PagedLatentAttention | None = None
        self.cuda_graphs: CudaGraphs | None = None
        self.verification_graphs: CudaGraphs | None = None
        self.num_drafts = speculative_config.num_speculative_tokens if speculative_config else 0
        self.kv_connector: KVConnectorRunner | None = None
        self.lora = lora_config and LRUCacheWorkerLoRAManager(
            model, lora_config, max_num_batched_tokens, lora_slots or AdapterSlots
        )
        self.reset()

    def _model_proposer(self, config: SpeculativeConfig | None, model: Decoder | Eagle3Head) -> ModelProposer:
        assert config is not None
        check_drafter(model.config, self.model.whole_config, self.max_model_len)
        return MODEL_PROPOSERS[config.method](
            config,
            model,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_cache_dtype=self.kv_cache_dtype,
            make_attention=self.make_attention,
        )

    def reset(self) -> None:
        """Drops all requests. After a step has failed, at whatever point, the state of the batch cannot be trusted."""
        self.batch = InputBatch(self.max_num_seqs, self.max_model_len, self.block_size)
        self.tokens_in_flight = TokensInFlight(self.batch, self.device)
        self.prompt_logprobs = PromptLogprobs()
        self._draft_token_ids: dict[str, list[int]] = {}
        self._aux_hidden_states: torch.Tensor | None = None
        self._waits_for_grammar: tuple[SchedulerOutput, StepInputs, torch.Tensor] | None = None

    def weight_bytes(self) -> int:
        """Bytes of all parameters and tables as stored in memory; tied ones count once."""
        return weight_bytes(self.model)

    def activation_peak(self, max_num_batched_tokens: int, max_num_seqs: int) -> int | None:
        """Measured bytes that the largest step needs beyond weights and cache; None on a CPU."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._dummy_step(max_num_batched_tokens, min(max_num_seqs, max_num_batched_tokens))
        if self.drafter:
            self.drafter.dummy_step(max_num_batched_tokens)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocates the cache, and the drafter's: `num_blocks` blocks in every layer. Called once."""
        where = self.device, self.dtype, self.kv_cache_dtype
        caches = allocate_kv_caches(self.config, num_blocks, self.block_size, *where)
        self.attention = self.make_attention(self.config, caches)
        if self.drafter:
            self.drafter.initialize_kv_cache(num_blocks)

    def named_kv_caches(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The caches by layer, with names as vLLM's: the model's, then the drafter's."""
        assert self.attention is not None
        named = {f"model.layers.{i}.self_attn.attn": tensors_of(one) for i, one in enumerate(self.attention.kv_caches)}
        if self.drafter and self.drafter.attention:
            drafts = enumerate(self.drafter.attention.kv_caches)
            named |= {f"draft.layers.{i}.self_attn.attn": tensors_of(one) for i, one in drafts}
        return named

    def capture_model(self, record: Record | None = None) -> None:
        """Captures the CUDA graphs of decode steps, and of those that verify drafts; the cache must exist.

        `record`: a `cuda_recorder` if None. Latents are attended to in a form that depends on their number, so they
        have graphs of decode steps only, and so has a drafter that reads hidden states, which a graph does not hand
        out.
        """
        assert self.attention is not None
        limits = self.max_num_seqs, self.batch.block_table.shape[1], self.max_model_len, self.block_size
        record = record or cuda_recorder(self.model.group.size)
        capture = partial(captured, record, self.model, self.attention, *limits, self.lora)
        reads_hidden = self.drafter is not None and bool(self.drafter.aux_layer_ids)
        self.cuda_graphs = capture()
        if self.num_drafts and self.config.kv_lora_rank is None and not reads_hidden:
            self.verification_graphs = capture(min(1 + self.num_drafts, self.max_model_len))

    def _graphs_for(self, inputs: StepInputs) -> CudaGraphs | None:
        """The graphs that hold this step, the smaller ones first."""
        both = (self.cuda_graphs, self.verification_graphs)
        return next((one for one in both if one is not None and one.size_for(inputs) is not None), None)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Runs one step: takes the scheduler's decisions, returns the sampled tokens.

        If any of its requests has a grammar, it returns none yet: `sample_by_grammar` comes next. After any error,
        `reset` must come before the next step.
        """
        with record_function_or_nullcontext("minivllm::prepare"):
            self.tokens_in_flight.settle()
            self._update_states(scheduler_output)
            defers = self.defers_tokens and self._can_defer(scheduler_output)
            if not defers:
                self.tokens_in_flight.settle(wait=True)
            if self.kv_connector is not None:
                self.kv_connector.begin(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                self._end_transfers(scheduler_output)
                return self._completed(ModelRunnerOutput({}))
            inputs = self.prepare_inputs(scheduler_output)
        with record_function_or_nullcontext("minivllm::forward"):
            hidden = self.forward(inputs)
        if not self.drafter:
            self._end_transfers(scheduler_output)
        if scheduler_output.has_structured_output_requests:
            self._waits_for_grammar = scheduler_output, inputs, hidden
            return ModelRunnerOutput({})
        if defers:
            with record_function_or_nullcontext("minivllm::sample"):
                return self._sample_later(inputs, hidden)
        return self._completed(self._end_step(scheduler_output, inputs, hidden))

    def _can_defer(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether the host computes nothing with the tokens that the step samples."""
        if self.prompt_logprobs or scheduler_output.has_structured_output_requests:
            return False
        rows = self.batch.rows_of(scheduler_output.num_scheduled_tokens)
        return not self.batch.sampling.needs_of(rows) & ~ON_DEVICE

    def _sample_later(self, inputs: StepInputs, hidden: torch.Tensor) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Samples on the device, and returns without waiting for the tokens. `hidden` is as returned by `forward`."""
        output = self._completed(ModelRunnerOutput({}))
        if not len(inputs.sampling):
            return output
        logits = self.model.compute_logits(hidden).float()  # [n, vocab]
        token_ids, largest = choose(logits, self._sampling_metadata(inputs))
        copy = self.tokens_in_flight.append(inputs.rows[inputs.sampling], token_ids, largest)
        return AsyncModelRunnerOutput(output, partial(fill_in, copy, inputs))

    @torch.inference_mode()
    def sample_by_grammar(self, grammar_output: GrammarOutput) -> ModelRunnerOutput:
        """Ends the step that `execute_model` began, and returns the sampled tokens."""
        assert self._waits_for_grammar is not None
        begun, self._waits_for_grammar = self._waits_for_grammar, None
        return self._completed(self._end_step(*begun, grammar_output))

    def _end_transfers(self, scheduler_output: SchedulerOutput) -> None:
        if self.kv_connector is not None:
            self.kv_connector.end(scheduler_output)

    def _completed(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The step's output with what else the core wants to know."""
        if self.kv_connector is not None:
            output.kv_connector_output = self.kv_connector.take_output()
        if self.lora is not None:
            output.lora_slots = list(self.lora.manager.lora_index_to_id)
        return output

    def _end_step(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden: torch.Tensor,
        grammar_output: GrammarOutput | None = None,
    ) -> ModelRunnerOutput:
        if not self.model.group.samples:
            self.prompt_logprobs.pass_over(inputs)
            return ModelRunnerOutput({})
        with record_function_or_nullcontext("minivllm::sample"):
            output = self.sample_tokens(inputs, hidden, grammar_output)
        if self.drafter and self.kv_connector is not None:
            self.kv_connector.wait_for_drafter()
        if self.proposer or self.drafter:
            with record_function_or_nullcontext("minivllm::draft"):
                self.propose_draft_token_ids(inputs, scheduler_output.num_spec_tokens_to_schedule)
        if self.drafter:
            self._end_transfers(scheduler_output)
        if self.keeps_drafts:
            output.num_invalid_spec_tokens = num_invalid_of(scheduler_output, inputs)
        return output

    def take_sampled(self, sampled: dict[str, list[int]], drafts: dict[str, list[int]]) -> None:
        """Takes what another rank has sampled, and drafted if drafts are kept, by request id."""
        self.batch.append_tokens(self.batch.rows_of(sampled), list(sampled.values()))
        self._draft_token_ids = drafts

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Gathers the step's inputs from the batch, on the host."""
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if self.keeps_drafts and drafts:
            num_scheduled_tokens, drafts = self._with_kept_drafts(num_scheduled_tokens, drafts)
        if not self.use_kv_cache:
            num_scheduled_tokens = self.batch.forget_computed(num_scheduled_tokens)
        return self.batch.prepare(num_scheduled_tokens, drafts)

    def _with_kept_drafts(
        self, num_scheduled_tokens: dict[str, int], placeholders: dict[str, list[int]]
    ) -> tuple[dict[str, int], dict[str, list[int]]]:
        """The step with this rank's own drafts after the last one, in place of the scheduler's placeholders.

        There may be fewer of them; then the request has fewer tokens in this step.
        """
        kept = self.take_draft_token_ids()
        drafts = {req_id: kept.get(req_id, [])[: len(unknown)] for req_id, unknown in placeholders.items()}
        missing = {req_id: len(placeholders[req_id]) - len(theirs) for req_id, theirs in drafts.items()}
        counts = {req_id: count - missing.get(req_id, 0) for req_id, count in num_scheduled_tokens.items()}
        return counts, {req_id: theirs for req_id, theirs in drafts.items() if theirs}

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states to sample from, [sum of num_sampled, hidden]; on a stage before the last, what it has sent on.

        If any prompt log probabilities are requested, those of all tokens, [tokens, hidden]. A step replays a CUDA
        graph if one fits, unless the drafter reads hidden states, which a graph does not hand out.
        """
        num_tokens, num_wanted = len(inputs.input_ids), len(inputs.logits_indices)
        all_wanted = num_wanted == num_tokens or bool(self.prompt_logprobs)
        rows = None if all_wanted else self._on_device(inputs.logits_indices)
        aux = AuxHiddenStates(self.drafter.aux_layer_ids) if self.drafter and self.drafter.aux_layer_ids else None
        graphs = None if self.prompt_logprobs or aux else self._graphs_for(inputs)
        lora_slots = self._lora_slots(inputs)
        if graphs is not None:
            hidden = self._replay(graphs, inputs, lora_slots)  # [tokens, hidden]
            return hidden if rows is None else hidden[rows]
        if self.lora is not None:
            self.lora.set_rows(lora_slots, None if all_wanted else inputs.logits_indices)
        input_ids, positions = self._on_device(inputs.input_ids), self._on_device(inputs.positions)
        self.tokens_in_flight.fill(input_ids, inputs)
        context, group = self._forward_context(inputs, aux), self.model.group
        received = None if group.stage.is_first else self._receive(num_tokens)
        hidden = self.model(input_ids, positions, context, rows, received)
        if aux is not None:
            self._aux_hidden_states = torch.cat(aux.states, dim=-1)
        if not group.stage.is_last:
            group.send_to_next_stage(hidden)
        return hidden

    def _lora_slots(self, inputs: StepInputs) -> np.ndarray | None:
        """The slot of each token's adapter [tokens], -1 for none, once all are in slots; None: nobody has one."""
        adapters = self.batch.lora_requests
        if self.lora is None or not adapters:
            return None
        by_request = [adapters.get(row) for row in inputs.rows.tolist()]
        distinct = {one.lora_int_id: one for one in by_request if one is not None}
        if not distinct:
            return None
        slot_of = self.lora.set_active_adapters(distinct.values())
        slots = np.array([-1 if one is None else slot_of[one.lora_int_id] for one in by_request], np.int32)
        return np.repeat(slots, np.diff(inputs.query_start_loc))

    def _replay(self, graphs: CudaGraphs, inputs: StepInputs, lora_slots: np.ndarray | None) -> torch.Tensor:
        if self.kv_connector is None:
            return graphs.replay(inputs, lora_slots, self.tokens_in_flight.fill)
        self.kv_connector.wait_for_layers()
        hidden = graphs.replay(inputs, lora_slots)
        self.kv_connector.save_layers()
        return hidden

    def _receive(self, num_tokens: int) -> torch.Tensor:
        shape = (2, num_tokens, self.config.hidden_size)
        return self.model.group.receive_from_previous_stage(torch.empty(shape, dtype=self.dtype, device=self.device))

    def sample_tokens(
        self, inputs: StepInputs, hidden: torch.Tensor, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        """Samples for the requests that reached their last known token, and appends the accepted tokens to the batch.

        `hidden` is as returned by `forward`.
        """
        prompt_logprobs = {}
        if self.prompt_logprobs:
            prompt_logprobs = self.prompt_logprobs.observe(self.batch, inputs, hidden, self.model.compute_logits)
            hidden = hidden[self._on_device(inputs.logits_indices)]  # [tokens, hidden] to [sum of num_sampled, hidden]
        if not len(inputs.sampling):
            return ModelRunnerOutput({})
        logits = self.model.compute_logits(hidden).float()  # [sum of num_sampled, vocab]
        if grammar_output is not None:
            self._apply_grammars(logits, inputs, grammar_output)
        metadata = self._sampling_metadata(inputs)
        if inputs.drafts:
            sampled = sample_with_drafts(logits, metadata, self._drafts_of(inputs), self.rejection_sample)
        else:
            sampled = sample(logits, metadata)
        output = kept_of(inputs, sampled)  # per request, accepted drafts and one more token
        output.prompt_logprobs, output.nonfinite_req_ids = prompt_logprobs, nonfinite_req_ids(inputs, sampled.largest)
        self.batch.append_tokens(inputs.rows[inputs.sampling], list(output.sampled_token_ids.values()))
        return output

    def _drafts_of(self, inputs: StepInputs) -> StepDrafts:
        """The drafts that the step verifies, as they lie in the batch, and what they were drawn from."""
        rows, num_drafts = inputs.rows[inputs.sampling], inputs.num_sampled - 1  # [n] each
        row_of, places = np.repeat(rows, num_drafts), consecutive(np.zeros(len(rows), np.int64), num_drafts)
        token_ids = self.batch.token_ids[row_of, np.repeat(self.batch.num_tokens[rows], num_drafts) + places]
        logits = None
        if self.drafter and self.drafter.draft_logits is not None:
            logits = self.drafter.draft_logits[self._on_device(row_of), self._on_device(places)]
        return StepDrafts(token_ids, num_drafts.astype(np.int32), logits)

    def _apply_grammars(self, logits: torch.Tensor, inputs: StepInputs, grammar_output: GrammarOutput) -> None:
        """Masks the tokens that do not fit, in the rows of the requests that have a grammar."""
        place_of = {inputs.req_ids[index]: place for place, index in enumerate(inputs.sampling)}
        places = [place_of[req_id] for req_id in grammar_output.structured_output_request_ids]
        starts = np.cumsum(inputs.num_sampled) - inputs.num_sampled  # [n]
        rows = consecutive(starts[places], inputs.num_sampled[places])
        bitmask = self._on_device(grammar_output.grammar_bitmask)
        apply_grammar_bitmask(logits, bitmask, self._on_device(rows.astype(np.int32)))

    def propose_draft_token_ids(self, inputs: StepInputs, most: int | None = None) -> None:
        """Asks the proposer to draft for the requests that sampled in this step, `most` tokens each if it is given.

        A drafter with a model is asked even for none, since its KV cache must not fall behind.
        """
        req_ids = [inputs.req_ids[index] for index in inputs.sampling]
        if self.drafter:
            num_drafts = self.drafter.config.num_speculative_tokens if most is None else most
            drafts = self.drafter.propose(self.batch, inputs, num_drafts, self._aux_hidden_states)
        elif most == 0:
            drafts = [[] for _ in req_ids]
        else:
            assert self.proposer is not None
            drafts = self.proposer.propose(self.batch, inputs.rows[inputs.sampling])
        by_req_id = zip(req_ids, drafts, strict=True)
        self._draft_token_ids = {req_id: kept for req_id, theirs in by_req_id if (kept := theirs[:most])}

    @property
    def kept_draft_token_ids(self) -> dict[str, list[int]]:
        """The drafts of the last step by request id, if they are kept for the next one."""
        return self._draft_token_ids if self.keeps_drafts else {}

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Returns the drafts to follow the last step's tokens, by request id, and clears them."""
        drafts, self._draft_token_ids = self._draft_token_ids, {}
        return drafts

    def _forward_context(self, inputs: StepInputs, aux: AuxHiddenStates | None) -> ForwardContext:
        assert self.attention is not None
        metadata = AttentionMetadata.of(inputs, self.device)
        attention = self.attention.of_step(metadata)
        if self.kv_connector is not None:
            attention = self.kv_connector.around(attention, metadata)
        return ForwardContext(attention, aux)

    def _sampling_metadata(self, inputs: StepInputs) -> SamplingMetadata:
        batch, rows = self.batch, inputs.rows[inputs.sampling]  # [n]
        if not batch.sampling.needs_of(rows):
            return NOTHING_NEEDED
        num_tokens = consecutive(batch.num_tokens[rows], inputs.num_sampled)  # [sum of num_sampled]
        rows = np.repeat(rows, inputs.num_sampled)  # [sum of num_sampled]
        return batch.sampling.metadata(rows, batch.token_ids, batch.num_prompt_tokens[rows], num_tokens)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self.prompt_logprobs.remove_request(req_id)
        for request in scheduler_output.scheduled_new_reqs:
            self.prompt_logprobs.add_request(request)
        self.batch.update(scheduler_output)

    @torch.inference_mode()
    def _dummy_step(self, num_tokens: int, num_rows: int) -> None:
        """The largest possible step, without attention; sampling applies top-p and min-p, but no bias or penalties."""
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        stage, shape = self.model.group.stage, (2, num_tokens, self.config.hidden_size)
        received = None if stage.is_first else torch.zeros(shape, dtype=self.dtype, device=self.device)
        hidden = self.model(ids, ids, without_attention(self.config, self.max_model_len), None, received)
        if not stage.is_last:
            return
        logits = self.model.compute_logits(hidden[:num_rows]).float()
        states = SamplingStates(num_rows)
        for row in range(num_rows):
            states.add_request(row, SamplingParams(top_p=0.9, min_p=0.01))
        none = np.zeros((num_rows, 0), np.int32)
        sample(logits, states.metadata(np.arange(num_rows), none, np.zeros(num_rows, int), np.zeros(num_rows, int)))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array, self.device)
