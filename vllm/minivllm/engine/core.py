"""The core's loop: schedule, execute, update. Token ids in, token ids out; it never sees text.

A step is all or nothing. Blocks are published when they are scheduled, before they are computed, so
a step that fails halfway leaves hashes for keys and values that were never computed. After any
exception in a step, the core starts over: the step's requests end with an error, the block pool is
recreated empty, the worker forgets its batch, and all other requests are recomputed from their
first token. Steps that were queued after the failed one are dropped with it.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCore.step`, `_initialize_kv_caches`).
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from minivllm.config import ModelConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.engine_messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReady, EngineCoreRequest
from minivllm.core.kv_connector import KVConnectorOutput, joined_stats
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.remote_kv import LOAD_FAILED
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_log import log_memory, log_step, profile_ranks
from minivllm.engine.generation_config import tokenizer_and_ends
from minivllm.engine.lora_registry import AdapterRefused, LoRARegistry
from minivllm.engine.step_recorder import StepRecorder
from minivllm.errors import AdapterError, MinivllmError, NonFiniteLogitsError, WorkerDiedError
from minivllm.executor.factory import make_executor
from minivllm.kv_connector.factory import connect_ranks
from minivllm.logger import init_logger
from minivllm.models.parallel import shard_config
from minivllm.models.pipeline import Stage, stage_config
from minivllm.platforms.device import pick_device
from minivllm.platforms.interrupts import InterruptsHeld
from minivllm.platforms.out_of_memory import explain_out_of_memory
from minivllm.platforms.profiling import record_function_or_nullcontext
from minivllm.structured_output.manager import StructuredOutputManager

logger = init_logger(__name__)
SECONDS_BETWEEN_EMPTY_STEPS = 0.001
"""The pace of steps without tokens, while keys and values are on their way."""
SECONDS_WITHOUT_A_STEP = 0.005
"""How long the core waits for a grammar when it has nothing else to do: then it looks for new
requests again.
"""


class _Batch(NamedTuple):
    """A step in flight, scheduled at `timestamp` in seconds of `time.monotonic()`."""

    scheduler_output: SchedulerOutput
    future: Future[ModelRunnerOutput]
    timestamp: float


class EngineCore:
    """A scheduler and the executor that runs its steps.

    `ledger` accounts for the memory of the rank with the fewest blocks; None if
    `num_gpu_blocks_override` set the number of blocks.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        device = pick_device(args.device)
        # Outputs of requests that ended outside a step; the next step delivers them.
        self._undelivered: list[EngineCoreOutput] = []
        self.model_config = ModelConfig.from_pretrained(args.model)
        # Fail before any process starts if the model cannot be divided like this.
        shard_config(self.model_config, args.tensor_parallel_size)
        stage_config(self.model_config, Stage(0, args.pipeline_parallel_size))
        # Large GPUs get a larger default batch.
        memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else None
        config = args.scheduler_config(self.model_config, memory)
        self.executor = make_executor(
            args.worker_settings(config, device.type, torch.get_num_threads()), args.distributed_executor_backend
        )
        try:
            self.ledger = profile_ranks(args, config, self.executor)
            num_blocks = self.ledger.num_blocks if self.ledger else args.num_gpu_blocks_override
            assert num_blocks is not None
            # All ranks get as many blocks as the smallest one has room for: they share the block
            # ids.
            self.executor.collective_rpc("initialize_kv_cache", num_blocks)
            connector = None
            if args.kv_transfer is not None:
                handshakes = self.executor.collective_rpc("initialize_kv_connector")
                connector = connect_ranks(handshakes, args.parts.kv_connector)
        except BaseException:
            self.executor.shutdown()
            raise
        # With several steps in flight, the scheduler must not wait for the tokens of the one
        # before.
        ahead = self.executor.max_concurrent_batches > 1
        scheduler_class = AsyncScheduler if ahead else Scheduler
        policy = args.parts.policy or DEFAULT_POLICY
        self.scheduler: Scheduler = scheduler_class(config, args.cache_config(num_blocks), policy)
        if connector is not None:
            recomputes = connector.config.kv_transfer_config.kv_load_failure_policy == "recompute"
            self.scheduler.use_connector(connector, recomputes)
        self.loras = LoRARegistry(self.executor, lambda: self.scheduler)
        self._takes_drafts = args.speculation is not None and not ahead  # else the worker keeps them
        self.batch_queue: deque[_Batch] = deque()
        self.structured_outputs = StructuredOutputManager(
            self.model_config.vocab_size, partial(tokenizer_and_ends, args)
        )
        self.step_recorder: StepRecorder | None = None
        log_memory(self.ledger, self.scheduler.limits, num_blocks, device)

    @property
    def ready(self) -> EngineCoreReady:
        """The facts about this core that the front end needs."""
        num_blocks = self.scheduler.cache_config.num_gpu_blocks
        return EngineCoreReady(self.scheduler.limits, num_blocks, self.ledger, self.scheduler.make_stats())

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request to the queue. A rejected one ends with an error, which the next step
        returns.
        """
        with self._all_or_nothing((request.request_id,)):
            try:
                # The adapter is read now, so that one which cannot be served is refused to its
                # first request.
                if request.lora_request is not None:
                    request = replace(request, lora_request=self.loras.add(request.lora_request))
                added = request.to_request()
                if request.sampling_params.structured_outputs is not None:
                    self.structured_outputs.grammar_init(added, request.sampling_params.structured_outputs)
                self.scheduler.add_request(added)
            except MinivllmError as error:
                self._undelivered.append(_failed(request.request_id, error, invalid_request=True))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort requests, waiting or running; unknown ids are ignored."""
        ids = set(request_ids)
        with self._all_or_nothing(ids):
            self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
            # The caller that aborts a request expects no further output of it.
            self._undelivered = [output for output in self._undelivered if output.request_id not in ids]
            self.loras.forget_unused()

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have anything to compute or return."""
        return bool(self._undelivered or self.batch_queue) or self.scheduler.has_unfinished_requests()

    def step(self) -> EngineCoreOutputs:
        """Fill the queue of steps in flight, then process the output of the oldest one. By default
        only one step is in flight.

        In vLLM: `EngineCore.step` and, for several, `step_with_batch_queue`.

        Raises:
            WorkerDiedError: a rank has died, and the engine with it.
            Exception: whatever the step raised. The requests in it (after `NonFiniteLogitsError`,
                only those it names) end with an error, which the next step returns; the others
                continue, also those of steps that were queued after it and are dropped.
        """
        queue = self.batch_queue
        concerned: Collection[str] | None = None
        try:
            while len(queue) < self.executor.max_concurrent_batches and self.scheduler.has_unfinished_requests():
                # A failure while scheduling may have touched any request.
                concerned = None
                now = time.monotonic()
                scheduler_output = self._schedule(waits=not queue)
                concerned = scheduler_output.num_scheduled_tokens
                # A step without tokens or news for the worker need not be sent.
                if scheduler_output.changes_worker:
                    queue.append(_Batch(scheduler_output, self._start(scheduler_output), now))
                if not concerned:
                    break  # nobody can go on before the outputs in flight have arrived
            # From here on only the oldest step can fail.
            concerned = ()
            if not queue:
                return self._delivered(self.state())
            batch = queue.popleft()
            concerned = batch.scheduler_output.num_scheduled_tokens
            if self.executor.max_concurrent_batches > 1:
                # Requests that were aborted meanwhile must not end a second time.
                concerned = [name for name in concerned if name in self.scheduler.requests]
            return self._update(batch.scheduler_output, batch.future.result(), batch.timestamp)
        except BaseException as failure:
            raise self._start_over(failure, self.scheduler.requests if concerned is None else concerned) from None

    def _schedule(self, waits: bool) -> SchedulerOutput:
        """Schedule a step. If there is nothing to compute and `waits` is set, wait for a grammar
        that is being compiled.
        """
        with record_function_or_nullcontext("minivllm::schedule"):
            scheduler_output = self.scheduler.schedule()
        if logger.isEnabledFor(logging.DEBUG):
            log_step(scheduler_output, self.scheduler)
        if waits and not scheduler_output.num_scheduled_tokens:
            self.structured_outputs.wait_for_one(SECONDS_WITHOUT_A_STEP)
        return scheduler_output

    def _start(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start the step. The grammars' bitmask is filled while the forward pass runs, and applied
        before sampling.
        """
        future = self.executor.start_model(scheduler_output)
        if not scheduler_output.has_structured_output_requests:
            return future
        with record_function_or_nullcontext("minivllm::grammar"):
            grammar_output = self.structured_outputs.grammar_bitmask(self.scheduler.requests, scheduler_output)
        # The forward pass may have failed at once; then there is nothing to sample.
        if future.done():
            future.result()  # raises its failure
        return self.executor.sample_tokens(grammar_output)

    def _update(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, timestamp: float
    ) -> EngineCoreOutputs:
        """Process the output of a step scheduled at `timestamp`; return it together with outputs
        that are still undelivered.
        """
        # Only the requests with NaN or infinite logits end; the rest of the step is valid, but it
        # is recomputed.
        nonfinite = [name for name in model_runner_output.nonfinite_req_ids if name in self.scheduler.requests]
        if nonfinite:
            raise NonFiniteLogitsError(nonfinite)
        report = model_runner_output.kv_connector_output
        if report is not None and report.invalid_block_ids:
            self._drop_step(report)
            return self._delivered(self.state())
        with record_function_or_nullcontext("minivllm::update"):
            outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output)
            self.loras.slots = model_runner_output.lora_slots or self.loras.slots
            self.loras.forget_unused()
            if self._takes_drafts:
                self.scheduler.update_draft_token_ids(self.executor.collective_rpc("take_draft_token_ids")[0])
            admitted = [request.req_id for request in scheduler_output.scheduled_new_reqs]
            snapshot = self._snapshot(scheduler_output, outputs)
        # Nothing is computed while keys and values are on their way: do not spin.
        if not scheduler_output.num_scheduled_tokens and self.scheduler.remote is not None:
            time.sleep(SECONDS_BETWEEN_EMPTY_STEPS)
        delivered = EngineCoreOutputs(outputs, self.scheduler.make_stats(), step_snapshot=snapshot)
        delivered.scheduled_req_ids, delivered.timestamp = admitted, timestamp
        if self.scheduler.remote is not None:
            counted = (report and report.kv_connector_stats, self.scheduler.remote.connector.take_stats())
            delivered.kv_connector_stats = joined_stats(counted)
        return self._delivered(delivered)

    def _delivered(self, delivered: EngineCoreOutputs) -> EngineCoreOutputs:
        delivered.outputs = [*self._undelivered, *delivered.outputs]
        self._undelivered = []
        return delivered

    def call_utility(self, method: str, *arguments: Any) -> Any:
        """Call a method of this core, or of its `LoRARegistry`, for the front end.

        Raises:
            MinivllmError: the arguments are invalid.
        """
        # The registry has the utilities that concern adapters.
        owner = self.loras if hasattr(self.loras, method) else self
        with self._all_or_nothing(()):
            return getattr(owner, method)(*arguments)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks. Do nothing and return False while any request holds a block.

        With `reset_running_requests`, the requests that hold blocks wait again and are recomputed
        from their first token. With `reset_connector`, what the KV connector has stored elsewhere
        is forgotten too.
        """
        if reset_running_requests:
            self._restart(())
        elif not self.scheduler.kv_cache_manager.block_pool.reset_prefix_cache():
            return False
        remote = self.scheduler.remote
        return not (reset_connector and remote is not None and remote.connector.reset_cache() is False)

    def start_step_events(self) -> None:
        """Attach a `step_snapshot` to the outputs of each step from now on, and to each change
        between steps.
        """
        self.step_recorder = self.step_recorder or StepRecorder(self.scheduler)

    def stop_step_events(self) -> str:
        """Stop attaching step snapshots; return the current state."""
        snapshot = self._snapshot()
        self.step_recorder = None
        return snapshot

    def state(self) -> EngineCoreOutputs:
        """Return the current state, for the front end, when no step reports it."""
        return EngineCoreOutputs([], self.scheduler.make_stats(), step_snapshot=self._snapshot())

    def shutdown(self) -> None:
        """Stop the ranks' processes, if any; no step can run without them.

        The connector's scheduler side shuts down last: it may own something that the ranks' sides
        write to, such as a folder.
        """
        try:
            self.executor.shutdown()
        finally:
            if self.scheduler.remote is not None:
                self.scheduler.remote.connector.shutdown()

    def _snapshot(self, step: SchedulerOutput | None = None, outputs: Sequence[EngineCoreOutput] = ()) -> str:
        """Describe the state, if there are watchers. A failure here never costs a request its
        output.
        """
        if self.step_recorder is None:
            return ""
        try:
            return self.step_recorder.snapshot(step, outputs, self.loras.named_slots())
        except Exception:
            logger.exception("Step recording failed; recorder disabled")
            self.step_recorder = None
            return ""

    @contextmanager
    def _all_or_nothing(self, request_ids: Collection[str]) -> Iterator[None]:
        """Start over without these requests if the block fails, except when it only rejects an
        adapter.
        """
        try:
            yield
        except AdapterRefused:  # it has changed nothing
            raise
        except BaseException as failure:
            raise self._start_over(failure, request_ids) from None

    def _start_over(self, failure: BaseException, request_ids: Collection[str]) -> BaseException:
        """End these requests with an error and have all others recomputed. Return the error to
        raise.
        """
        # Without its ranks the engine cannot go on.
        if isinstance(failure, WorkerDiedError):
            return failure
        # A second Ctrl-C here would leave the scheduler and the ranks in different states.
        with InterruptsHeld(clean_up=True):
            error = explain_out_of_memory(failure) or failure
            lost = self._ended_by(error, request_ids)
            logger.warning("A step failed (%s: %s): %d requests end", type(error).__name__, error, len(lost))
            # A request must not get two last outputs.
            known = {output.request_id for output in self._undelivered}
            self._undelivered += [_failed(request_id, error) for request_id in lost if request_id not in known]
            self._restart(lost)
        return error

    def _drop_step(self, report: KVConnectorOutput) -> None:
        """Start over after a load within the step has failed, because the step has computed with
        what is not there.
        """
        assert self.scheduler.remote is not None
        lost = self.scheduler.remote.failed_loads(report, self.scheduler.requests)
        logger.warning("Keys and values could not be loaded: %d requests end, others are recomputed", len(lost))
        self._undelivered += [EngineCoreOutput.failed(request_id, LOAD_FAILED) for request_id in lost]
        self._restart(lost)

    def _ended_by(self, error: BaseException, request_ids: Collection[str]) -> list[str]:
        """Return the requests that a failure ends: the ones it names, or else the ones in the step."""
        if isinstance(error, NonFiniteLogitsError):
            return list(error.request_ids)
        if not isinstance(error, AdapterError):
            return list(request_ids)
        self.loras.could_not_be_read(error.lora_int_id)
        adapters = {name: request.lora_request for name, request in self.scheduler.requests.items()}
        return [name for name, adapter in adapters.items() if adapter and adapter.lora_int_id == error.lora_int_id]

    def _restart(self, lost: Collection[str]) -> None:
        self.batch_queue.clear()
        # First the scheduler, which cannot fail; the ranks may be dead.
        self.scheduler.start_over(lost)
        self.executor.collective_rpc("reset")


def _failed(request_id: str, error: BaseException, invalid_request: bool = False) -> EngineCoreOutput:
    reason = str(error) if isinstance(error, MinivllmError) else f"{type(error).__name__}: {error}"
    return EngineCoreOutput.failed(request_id, reason, invalid_request)
