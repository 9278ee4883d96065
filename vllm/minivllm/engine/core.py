"""The core's loop: schedule, execute, update. Token ids in, token ids out; it never sees text.

A step is all or nothing. Blocks are published when they are scheduled, before they are computed, so a step that fails
halfway leaves hashes for keys and values that were never computed. After any exception in a step, the core starts over:
the step's requests end with an error, the block pool is recreated empty, the worker forgets its batch, and all other
requests are recomputed from their first token.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCore.step`, `_initialize_kv_caches`).
"""

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from minivllm.config import ModelConfig, SchedulerConfig
from minivllm.config.units import GIB
from minivllm.core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.generation_config import GenerationConfig
from minivllm.errors import MinivllmError, NonFiniteLogitsError, WorkerDiedError
from minivllm.executor.abstract import make_executor
from minivllm.logger import init_logger
from minivllm.memory import MemoryLedger, max_concurrency
from minivllm.models.parallel import shard_config
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.device import pick_device
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.platforms.out_of_memory import explain_out_of_memory
from minivllm.platforms.profiling import record_function_or_nullcontext
from minivllm.structured_output.manager import StructuredOutputManager
from minivllm.worker.memory_profiling import check_override, profile_memory

logger = init_logger(__name__)
SECONDS_WITHOUT_A_STEP = 0.005
"""How long the core waits for a grammar when it has nothing else to do: then it looks for new requests again."""


class EngineCore:
    """A scheduler and the executor that runs its steps.

    `ledger` says where the memory of the rank with the fewest blocks went; None if `num_gpu_blocks_override` set the
    number of blocks.
    """

    def __init__(self, args: EngineArgs) -> None:
        device = pick_device(args.device)
        self._speculates = args.speculation is not None
        self._undelivered: list[EngineCoreOutput] = []
        self.model_config = ModelConfig.from_pretrained(args.model)
        shard_config(self.model_config, args.tensor_parallel_size)
        memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else None
        config = args.scheduler_config(self.model_config, memory)
        self.executor = make_executor(
            args.worker_settings(config, device.type, torch.get_num_threads()), args.distributed_executor_backend
        )
        try:
            self.ledger = self._profile(args, config)
            num_blocks = self.ledger.num_blocks if self.ledger else args.num_gpu_blocks_override
            assert num_blocks is not None
            self.executor.collective_rpc("initialize_kv_cache", num_blocks)
        except BaseException:
            self.executor.shutdown()
            raise
        self.scheduler: Scheduler = (args.parts.scheduler or Scheduler)(
            config, args.cache_config(num_blocks), args.parts
        )
        self.structured_outputs = StructuredOutputManager(self.model_config.vocab_size, partial(_tokenizer_of, args))
        self._log_memory()

    @property
    def ready(self) -> EngineCoreReady:
        """What the front end needs to know about this core."""
        num_blocks = self.scheduler.cache_config.num_gpu_blocks
        return EngineCoreReady(self.scheduler.limits, num_blocks, self.ledger, self.scheduler.make_stats())

    def add_request(self, request: EngineCoreRequest) -> None:
        """Adds a request to the queue. A rejected one ends with an error, which the next step returns."""
        with self._all_or_nothing((request.request_id,)):
            try:
                added = request.to_request()
                if request.sampling_params.structured_outputs is not None:
                    self.structured_outputs.grammar_init(added, request.sampling_params.structured_outputs)
                self.scheduler.add_request(added)
            except MinivllmError as error:
                self._undelivered.append(_failed(request.request_id, error))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests, waiting or running; unknown ids are ignored."""
        ids = set(request_ids)
        with self._all_or_nothing(ids):
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            self._undelivered = [output for output in self._undelivered if output.request_id not in ids]

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything for a step to do or return."""
        return bool(self._undelivered) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Runs one step: scheduling, a forward pass, and processing of its output.

        Raises:
            WorkerDiedError: a rank has died, and the engine with it.
            Exception: whatever the step raised. The requests in it (after `NonFiniteLogitsError`, only those it names)
                end with an error, which the next step returns; the others continue.
        """
        scheduled: Collection[str] | None = None
        now = time.monotonic()
        try:
            with record_function_or_nullcontext("minivllm::schedule"):
                scheduler_output = self.scheduler.schedule()
            scheduled = scheduler_output.num_scheduled_tokens
            self._log_step(scheduler_output)
            if not scheduled:
                self.structured_outputs.wait_for_one(SECONDS_WITHOUT_A_STEP)
            model_runner_output = self._execute(scheduler_output)
            if model_runner_output.nonfinite_req_ids:
                raise NonFiniteLogitsError(model_runner_output.nonfinite_req_ids)
            with record_function_or_nullcontext("minivllm::update"):
                outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output)
                if self._speculates:
                    self.scheduler.update_draft_token_ids(self.executor.take_draft_token_ids())
                admitted = [request.req_id for request in scheduler_output.scheduled_new_reqs]
                delivered = EngineCoreOutputs(
                    [*self._undelivered, *outputs],
                    self.scheduler.make_stats(),
                    scheduled_req_ids=admitted,
                    timestamp=now,
                )
                self._undelivered = []
            return delivered
        except BaseException as failure:
            raise self._start_over(failure, self.scheduler.requests if scheduled is None else scheduled) from None

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs the step. The grammars' bitmask is filled while the forward pass runs, and applied before sampling."""
        if not scheduler_output.has_structured_output_requests:
            return self.executor.execute_model(scheduler_output)
        forward = self.executor.execute_model(scheduler_output, non_block=True)
        with record_function_or_nullcontext("minivllm::grammar"):
            grammar_output = self.structured_outputs.grammar_bitmask(self.scheduler.requests, scheduler_output)
        forward.result()
        return self.executor.sample_tokens(grammar_output)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Does nothing and returns False while any request holds a block."""
        with self._all_or_nothing(()):
            return self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the processes of the ranks, if any; without them no step can run."""
        self.executor.shutdown()

    @contextmanager
    def _all_or_nothing(self, request_ids: Collection[str]) -> Iterator[None]:
        """If the block fails, starts over without these requests."""
        try:
            yield
        except BaseException as failure:
            raise self._start_over(failure, request_ids) from None

    def _start_over(self, failure: BaseException, request_ids: Collection[str]) -> BaseException:
        """Ends these requests with an error and has all others recomputed. Returns the error to raise."""
        if isinstance(failure, WorkerDiedError):
            return failure
        with InterruptsHeld(clean_up=True):
            return self._drop_step(explain_out_of_memory(failure) or failure, request_ids)

    def _drop_step(self, error: BaseException, request_ids: Collection[str]) -> BaseException:
        lost = list(error.request_ids if isinstance(error, NonFiniteLogitsError) else request_ids)
        logger.warning("A step failed (%s: %s): %d requests end", type(error).__name__, error, len(lost))
        known = {output.request_id for output in self._undelivered}
        self._undelivered += [_failed(request_id, error) for request_id in lost if request_id not in known]
        self.scheduler.start_over(lost)
        self.executor.collective_rpc("reset")
        return error

    def _log_step(self, output: SchedulerOutput) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return
        logger.debug(
            "step of %d tokens %s; admitted %s, preempted %s; %d running, %d waiting, %d blocks free",
            output.total_num_scheduled_tokens,
            output.num_scheduled_tokens,
            [request.req_id for request in output.scheduled_new_reqs],
            sorted(output.preempted_req_ids),
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )

    def _log_memory(self) -> None:
        if self.ledger is not None:
            for row in self.ledger.rows:
                logger.info("Memory: %.3f GiB %s%s", row.bytes / GIB, row.name, " (estimated)" if row.estimated else "")
        cache = self.scheduler.cache_config
        tokens, max_model_len = cache.num_gpu_blocks * cache.block_size, self.scheduler.config.max_model_len
        logger.info("KV cache size: %s tokens in %s blocks", f"{tokens:,}", f"{cache.num_gpu_blocks:,}")
        concurrency = max_concurrency(tokens, max_model_len)
        logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{max_model_len:,}", concurrency)

    def _profile(self, args: EngineArgs, config: SchedulerConfig) -> MemoryLedger | None:
        if args.num_gpu_blocks_override is not None:
            check_override(args.num_gpu_blocks_override, args.block_size, config.max_model_len)
            return None
        ledgers = [
            profile_memory(
                self.model_config,
                use,
                tp=args.tensor_parallel_size,
                kv_cache_dtype=args.kv_cache_dtype,
                block_size=args.block_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                gpu_memory_utilization=args.gpu_memory_utilization,
            )
            for use in self.executor.collective_rpc("memory_use")
        ]
        return min(ledgers, key=lambda ledger: ledger.num_blocks)


def _tokenizer_of(args: EngineArgs) -> tuple[str, tuple[int, ...]]:
    """The tokenizer as JSON, and the model's end-of-sequence tokens."""
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = ModelConfig.from_pretrained(args.model)
    return tokenizer.to_str(), GenerationConfig.of(args.model, config, tokenizer).eos_token_ids


def _failed(request_id: str, error: BaseException) -> EngineCoreOutput:
    reason = str(error) if isinstance(error, MinivllmError) else f"{type(error).__name__}: {error}"
    return EngineCoreOutput(request_id, [], finish_reason="error", error=reason)
