"""The worker's step: update the batch, gather its inputs, run one forward pass over all of it,
sample.

Prefills, chunks and decodes share one flat row of tokens; only the attention metadata tells them
apart. Logits are computed only for the rows that sample. In a tensor-parallel group only rank 0
samples and broadcasts the result: identical logits would give identical tokens, but ranks need not
agree to the last bit.

Every optional feature is an object of its own that the runner calls at fixed points of each step:
adapters (`lora`), drafts (`speculator`, `draft_tokens_handler`), CUDA graphs (`cuda_graphs`),
transfers of keys and values (`kv_connector`), prompts' log probabilities (`prompt_logprobs`). Where
a feature is off, its object does nothing.

In vLLM v0.33.0: `vllm/v1/worker/gpu/model_runner.py` (`GPUModelRunner.execute_model`,
`sample_tokens`).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from minivllm.core.scheduler_output import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.kernels.cpu.replay import CannotRecord, CpuRecorder
from minivllm.logger import init_logger
from minivllm.lora.worker_manager import make_lora_manager
from minivllm.models.decoder import Decoder
from minivllm.models.eagle3 import Eagle3Head
from minivllm.models.forward_context import ForwardContext
from minivllm.models.linear import process_weights_after_loading
from minivllm.platforms.device import on_device
from minivllm.platforms.profiling import record_function_or_nullcontext
from minivllm.worker.attention import make_attention
from minivllm.worker.cuda_graphs import MOST_ROWS, MOST_ROWS_ON_CPU, CudaGraphManager, cuda_recorder
from minivllm.worker.input_batch import InputBatch, StepInputs, check_batch_memory, flattened
from minivllm.worker.kv_cache import allocate_kv_caches, check_kv_cache_dtype
from minivllm.worker.kv_connector_runner import KVConnectorRunner, tensors_of
from minivllm.worker.latent_attention import PagedLatentAttention
from minivllm.worker.paged_attention import AttentionMetadata, PagedAttention
from minivllm.worker.sample.prompt_logprobs import PromptLogprobs
from minivllm.worker.sample.sampler import NOTHING_NEEDED, ON_DEVICE, SamplingMetadata, choose, sample
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.spec_decode.proposer import make_speculator
from minivllm.worker.spec_decode.rejection_sampler import StepDrafts, sample_with_drafts
from minivllm.worker.spec_decode.speculator import DraftTokensHandler
from minivllm.worker.step_output import fill_in, kept_of, nonfinite_req_ids
from minivllm.worker.structured_outputs import mask_by_grammars
from minivllm.worker.tokens_in_flight import TokensInFlight

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """The state that `execute_model` leaves for `sample_tokens`: the step, its hidden states as
    `forward` returns them, and their logits, followed by padding, if they are computed already.

    `on_device`: its tokens stay there, and the step ends without waiting for them.
    """

    scheduler_output: SchedulerOutput
    inputs: StepInputs
    hidden: torch.Tensor
    logits: torch.Tensor | None
    on_device: bool


class ModelRunner:
    """A model on a device with its batch and its cache. It knows blocks and rows, but no queues
    or policies.
    """

    def __init__(
        self, model: Decoder, settings: WorkerSettings, draft_model: Decoder | Eagle3Head | None = None
    ) -> None:
        self.model = model
        self.config = model.config
        self.settings = settings
        weight = model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        process_weights_after_loading(model)
        check_kv_cache_dtype(settings.kv_cache_dtype, self.device, self.config)
        check_batch_memory(settings.max_num_seqs, settings.max_model_len, settings.block_size)
        self.make_attention = partial(make_attention, backend=settings.attention_backend, attention=settings.attention)
        self.attention: PagedAttention | PagedLatentAttention | None = None
        # Whether steps end before their tokens are on the host, if these are not needed there
        # (`tokens_in_flight`).
        self.defers_tokens = False
        self.rejection_sample = settings.rejection_sample
        self.speculator = make_speculator(settings, model, draft_model, self.make_attention)
        self.draft_tokens_handler = DraftTokensHandler(keeps_drafts=settings.async_scheduling)
        self.cuda_graphs = CudaGraphManager()
        self.kv_connector = KVConnectorRunner()
        self.lora = make_lora_manager(model, settings.lora_config, settings.max_num_batched_tokens, settings.lora_slots)
        self.reset()

    def reset(self) -> None:
        """Drop all requests. After a step has failed, at whatever point, the state of the batch
        cannot be trusted.
        """
        settings = self.settings
        self.batch = InputBatch(settings.max_num_seqs, settings.max_model_len, settings.block_size)
        self.tokens_in_flight = TokensInFlight(self.batch, self.device)
        self.prompt_logprobs = PromptLogprobs()
        self.draft_tokens_handler.take()
        self.execute_model_state: ExecuteModelState | None = None

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache, and the speculator's: `num_blocks` blocks in every layer. Called
        once.
        """
        where = self.device, self.dtype, self.settings.kv_cache_dtype
        caches = allocate_kv_caches(self.config, num_blocks, self.settings.block_size, *where)
        self.attention = self.make_attention(self.config, caches)
        self.speculator.initialize_kv_cache(num_blocks)

    def named_kv_caches(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the caches by layer, with names as vLLM's: the model's, then the speculator's."""
        assert self.attention is not None
        caches = {"model": self.attention.kv_caches, "draft": self.speculator.kv_caches}
        return {
            f"{owner}.layers.{index}.self_attn.attn": tensors_of(cache)
            for owner, layers in caches.items()
            for index, cache in enumerate(layers)
        }

    def capture_model(self) -> None:
        """Capture the graphs of decode steps, and of those that verify drafts; the cache must exist.

        On a CPU, small steps are recorded, if the model computes nothing that a recording cannot
        repeat.
        """
        assert self.attention is not None
        on_cpu = self.device.type == "cpu"
        record = CpuRecorder() if on_cpu else cuda_recorder(self.model.group.size)
        most_rows = MOST_ROWS_ON_CPU if on_cpu else MOST_ROWS
        try:
            self.cuda_graphs.capture(record, self.model, self.attention, self.settings, self.lora, most_rows)
        except CannotRecord as error:
            logger.debug("Steps run without graphs: %s", error)
            self.cuda_graphs.release_graphs()

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Run one step: take the scheduler's decisions, return the sampled tokens.

        If any of its requests has a grammar, return none yet: `sample_tokens` comes next. After any
        error, `reset` must come before the next step.
        """
        with record_function_or_nullcontext("minivllm::prepare"):
            self.prompt_logprobs.update(scheduler_output)
            self.batch.update(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                self.kv_connector.no_forward(scheduler_output)
                return self._completed(ModelRunnerOutput({}))
            on_device = self._stays_on_device(scheduler_output)
            # A step that needs the tokens on the host waits here.
            self.tokens_in_flight.settle(wait=not on_device)
            self.kv_connector.pre_forward(scheduler_output)
            inputs = self.prepare_inputs(scheduler_output)
        with record_function_or_nullcontext("minivllm::forward"):
            hidden, logits = self.forward(inputs)
        self.kv_connector.post_forward(scheduler_output)
        self.execute_model_state = ExecuteModelState(scheduler_output, inputs, hidden, logits, on_device)
        if scheduler_output.has_structured_output_requests:
            return ModelRunnerOutput({})  # while this pass runs, the core fills the grammars' bitmask
        return self.sample_tokens()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """End the step that `execute_model` began: sample its tokens, and draft what may follow
        them.
        """
        assert self.execute_model_state is not None
        step, self.execute_model_state = self.execute_model_state, None
        if not self.model.group.samples:  # another rank samples, and sends the tokens
            self.prompt_logprobs.pass_over(step.inputs)
            return self._completed(ModelRunnerOutput({}))
        with record_function_or_nullcontext("minivllm::sample"):
            output = self.sample(step, grammar_output)
        self.kv_connector.wait_for_layers(self.kv_connector.drafter_names)
        with record_function_or_nullcontext("minivllm::draft"):
            most = step.scheduler_output.num_spec_tokens_to_schedule
            self.draft_tokens_handler.put(self.speculator.propose_draft_token_ids(self.batch, step.inputs, most))
        self.kv_connector.finalize_step(step.scheduler_output)
        return self._completed(output)

    def _stays_on_device(self, scheduler_output: SchedulerOutput) -> bool:
        """Return whether the host computes nothing with the step's sampled tokens, and so need
        not wait for them.
        """
        if not self.defers_tokens or self.prompt_logprobs or scheduler_output.has_structured_output_requests:
            return False
        rows = self.batch.rows_of(scheduler_output.num_scheduled_tokens)
        return not self.batch.sampling.needs_of(rows) & ~ON_DEVICE

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Gather the step's inputs from the batch, on the host."""
        num_scheduled_tokens, drafts = self.draft_tokens_handler.scheduled(scheduler_output)
        if not self.settings.use_kv_cache:
            num_scheduled_tokens = self.batch.forget_computed(num_scheduled_tokens)
        return self.batch.prepare(num_scheduled_tokens, drafts)

    def forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the hidden states to sample from, [sum of num_sampled, hidden], by a CUDA graph if
        one fits; and their logits, float32, if the graph computes them, followed by padding.

        If any prompt log probabilities are requested, those of all tokens, [tokens, hidden]; on a
        stage before the last, what it has sent on.
        """
        num_tokens = len(inputs.input_ids)
        # Prompts' log probabilities need every token.
        all_wanted = len(inputs.logits_indices) == num_tokens or bool(self.prompt_logprobs)
        rows = None if all_wanted else on_device(inputs.logits_indices, self.device)
        lora_slots = self.lora.slots_of_tokens(self.batch.lora_requests, inputs.rows, inputs.query_start_loc)
        graphs = None if self.prompt_logprobs else self.cuda_graphs.dispatch(inputs)
        if graphs is not None:
            self.kv_connector.wait_for_layers(self.kv_connector.layer_names)
            hidden = graphs.replay(inputs, lora_slots, self.tokens_in_flight.fill)  # [tokens, hidden]
            self.kv_connector.save_layers(self.kv_connector.layer_names)
            return (hidden, graphs.logits) if rows is None else (hidden[rows], None)
        self.lora.set_rows(lora_slots, None if all_wanted else inputs.logits_indices)
        input_ids, positions = on_device(inputs.input_ids, self.device), on_device(inputs.positions, self.device)
        self.tokens_in_flight.fill(input_ids, inputs)
        assert self.attention is not None
        metadata = AttentionMetadata.of(inputs, self.device)
        attention = self.kv_connector.around(self.attention.of_step(metadata), metadata)
        context = ForwardContext(attention, self.speculator.aux_hidden_states())
        group = self.model.group
        received = None
        if not group.stage.is_first:
            shape = (2, num_tokens, self.config.hidden_size)
            received = group.receive_from_previous_stage(torch.empty(shape, dtype=self.dtype, device=self.device))
        hidden = self.model(input_ids, positions, context, rows, received)
        if not group.stage.is_last:
            group.send_to_next_stage(hidden)
        return hidden, None

    def sample(
        self, step: ExecuteModelState, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample for the requests that reached their last known token, and append the tokens to
        the batch.
        """
        inputs, hidden = step.inputs, step.hidden
        prompt_logprobs = {}
        if self.prompt_logprobs:
            prompt_logprobs = self.prompt_logprobs.observe(self.batch, inputs, hidden, self.model.compute_logits)
            # [tokens, hidden] to [sum of num_sampled, hidden]
            hidden = hidden[on_device(inputs.logits_indices, self.device)]
        if not len(inputs.sampling):
            return ModelRunnerOutput({})
        rows = inputs.rows[inputs.sampling]  # [n]
        # [sum of num_sampled, vocab]
        logits = self.model.compute_logits(hidden).float() if step.logits is None else step.logits[: len(hidden)]
        mask_by_grammars(logits, inputs, grammar_output)
        metadata = self._sampling_metadata(rows, inputs.num_sampled)
        # The next step reads the tokens there; the host waits for a copy when it wants the output.
        if step.on_device:
            copy = self.tokens_in_flight.append(rows, *choose(logits, metadata))
            return AsyncModelRunnerOutput(ModelRunnerOutput({}), partial(fill_in, copy, inputs))
        if inputs.drafts:
            drafts = StepDrafts.of(self.batch, inputs, self.speculator.draft_logits)
            sampled = sample_with_drafts(logits, metadata, drafts, self.rejection_sample)
        else:
            sampled = sample(logits, metadata)
        output = kept_of(inputs, sampled)  # per request, accepted drafts and one more token
        output.prompt_logprobs = prompt_logprobs
        output.nonfinite_req_ids = nonfinite_req_ids(inputs, sampled.largest)
        output.num_invalid_spec_tokens = self.draft_tokens_handler.num_invalid_spec_tokens
        # Rejected drafts are overwritten; the scheduler sends the right count with the next step.
        self.batch.append_tokens(rows, list(output.sampled_token_ids.values()))
        return output

    def _sampling_metadata(self, rows: np.ndarray, num_sampled: np.ndarray) -> SamplingMetadata:
        """Gather the parameters of rows [n] that sample `num_sampled` [n] tokens each."""
        batch = self.batch
        if not batch.sampling.needs[rows].any():
            return NOTHING_NEEDED
        rows, num_tokens = flattened(rows, batch.num_tokens[rows], num_sampled)  # [sum of num_sampled] each
        return batch.sampling.metadata(rows, batch.token_ids, batch.num_prompt_tokens[rows], num_tokens)

    def _completed(
        self, output: ModelRunnerOutput | AsyncModelRunnerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Complete a step's output with what was transferred and which adapters have slots."""
        # The part that is known before the tokens are.
        whole = output.output if isinstance(output, AsyncModelRunnerOutput) else output
        whole.kv_connector_output = self.kv_connector.take_output()
        whole.lora_slots = list(self.lora.lora_index_to_id)
        return output

    def take_sampled(self, sampled: dict[str, list[int]], drafts: dict[str, list[int]]) -> None:
        """Take what another rank has sampled, and drafted if drafts are kept, by request id."""
        self.batch.append_tokens(self.batch.rows_of(sampled), list(sampled.values()))
        self.draft_tokens_handler.put(drafts)
