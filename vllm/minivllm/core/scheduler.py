"""Decide how many tokens each request gets in the next step: continuous batching under one token
budget.

There is no prefill phase and no decode phase. In each step every request tries to catch up:
`num_computed_tokens` moves towards `num_tokens_with_spec`. Running requests go first, in order of
admission, then waiting ones; prefills, chunks of prefills, decodes and draft tokens to verify share
the step. If there is no free block for a running request, a request is preempted: it loses its
blocks, keeps its tokens and is recomputed later.

In vLLM v0.33.0: `vllm/v1/core/sched/scheduler.py` (`Scheduler.schedule`, `_preempt_request`,
`_update_after_schedule`, `update_from_output`, `add_request`, `finish_requests`, `_free_request`),
without encoder inputs. The rules that a caller may replace are in `minivllm.core.policy`, the
handling of requests with a KV connector in `minivllm.core.remote_kv`, and that of steps in flight
in `minivllm.core.async_scheduler`. With several cores, each has a scheduler of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.kv_connector import KVConnectorBase_V1
from minivllm.core.limits import RequestLimits
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.core.remote_kv import LOAD_FAILED, RemoteKV
from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import RequestQueue, create_request_queue
from minivllm.core.scheduler_output import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from minivllm.core.stats import SchedulerStats, SpecDecodingStats
from minivllm.core.step import Step
from minivllm.core.stop import check_grammar, check_stop
from minivllm.errors import MinivllmError


class Scheduler:
    """The object that decides each step, and keeps track of `running` (in order of admission),
    `waiting` and the block tables.

    One iteration is `schedule()`, a forward pass, `update_from_output()`. To change how it decides,
    replace a rule of `core.policy` instead of deriving a class. Here, only `AsyncScheduler` derives from
    it; it extends `cap_num_tokens`, `_is_blocked`, `_make_output`, `_update_after_schedule`,
    `_roll_back_rejected`, `_update_request_with_output` and `_cache_accepted`.
    """

    def __init__(
        self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, policy: SchedulingPolicy = DEFAULT_POLICY
    ) -> None:
        self.config = scheduler_config
        self.cache_config = cache_config
        self.policy = policy
        self.drafting = scheduler_config.drafting
        self.kv_cache_manager = self._make_kv_cache_manager()
        # The front end gets a copy of these limits, so that it can refuse a request where the
        # caller stands.
        self.limits = RequestLimits(
            scheduler_config.max_model_len,
            cache_config.block_size,
            self.kv_cache_manager.block_pool.num_usable_blocks,
            scheduler_config.num_extra_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(scheduler_config.policy)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.spec_decoding_stats = SpecDecodingStats()
        self._failed: list[EngineCoreOutput] = []
        self.remote: RemoteKV | None = None
        self.pinned_loras: set[int] = set()
        """Adapters that keep a slot even when no request uses them."""

    def use_connector(self, connector: KVConnectorBase_V1, recompute_kv_load_failures: bool = False) -> None:
        """Attach a KV connector; call it before the first request."""
        self.remote = RemoteKV(connector, self.kv_cache_manager, recompute_kv_load_failures)

    # Adding and removing requests

    def add_request(self, request: Request) -> None:
        """Add a request to the waiting queue. Raise `MinivllmError` for one that cannot be
        served.
        """
        assert request.request_id not in self.requests, "the front end gives each request an id of its own"
        self.limits.check(f"request {request.request_id!r}", request.num_prompt_tokens, request.max_tokens)
        if self.remote is not None:
            self.remote.connector.on_new_request(request)
        # A connector finds blocks by their hashes, even where the engine's own cache is off.
        if self.cache_config.enable_prefix_caching or self.remote is not None:
            request.enable_block_hashes(self.cache_config.block_size, self.policy.hash_block_tokens)
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[str]:
        """End requests from outside (the client left: FINISHED_ABORTED; a stop string was found:
        FINISHED_STOPPED).

        Ignore unknown and already finished ids. Return the ids of the requests ended, in the given
        order.
        """
        assert status.is_finished
        # `fromkeys` removes duplicates and keeps the order.
        ended = [self.requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        waiting = [request for request in ended if request.status is not RequestStatus.RUNNING]
        if waiting:
            self.waiting.remove_requests(waiting)
            if self.remote is not None:
                self.remote.received.remove_requests(waiting)
        self._finish(ended, status)
        return [request.request_id for request in ended]

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is unfinished, or a KV connector needs another step."""
        if self.requests or self.remote is None:
            return bool(self.requests)
        return bool(self.finished_req_ids) or self.remote.is_busy()

    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the state now and of all counts since the start."""
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.requests) - len(self.running),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.prefix_cache_stats,
            spec_decoding_stats=self.spec_decoding_stats.copy(),
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            connector_prefix_cache_stats=self.remote.connector_prefix_cache_stats if self.remote else None,
        )

    def start_over(self, lost: Collection[str]) -> None:
        """Discard everything that a failed step may have left half done: the pool, all cached
        blocks, the batch.

        Requests in `lost` are dropped. All others wait again in the order in which they were added;
        they keep their tokens and are recomputed from the first token. The worker must forget all
        requests too.
        """
        # Counts are since the start of the engine, so they outlive the pool.
        counted = self.kv_cache_manager.prefix_cache_stats
        self.kv_cache_manager = self._make_kv_cache_manager()
        self.kv_cache_manager.prefix_cache_stats = counted
        gone = [request for name, request in self.requests.items() if name in lost]
        self.requests = {name: request for name, request in self.requests.items() if name not in lost}
        self.running = []
        self.finished_req_ids = set()
        self.waiting = create_request_queue(self.config.policy)
        for request in self.requests.values():
            if request.status is RequestStatus.RUNNING:
                request.status = RequestStatus.PREEMPTED
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            request.num_computed_tokens = 0
            request.num_output_placeholders = 0
            request.spec_token_ids = []
            self.waiting.add_request(request)
        if self.remote is not None:
            for request in gone:
                request.status = RequestStatus.FINISHED_ERROR
            self.remote.start_over(self.kv_cache_manager, gone)

    # One step

    def schedule(self) -> SchedulerOutput:
        """Return the next step. Its tokens count as computed in `num_computed_tokens` at once,
        before they are.
        """
        budget = self.config.max_num_batched_tokens
        threshold = self.config.long_prefill_token_threshold
        adaptive = self.config.long_prefill_token_threshold_adaptive
        step = Step(budget, self.policy.chunk_limit(budget, threshold, len(self.requests), adaptive))
        self.policy.schedule(self, step)
        output = self._make_output(step)
        if self.drafting.num_speculative_tokens_per_batch_size:
            output.num_spec_tokens_to_schedule = self.drafting.num_drafts_after(len(output.num_scheduled_tokens))
        if self.remote is not None:
            self.remote.complete(output)
        self._update_after_schedule(output)
        return output

    def schedule_running(self, step: Step) -> None:
        """Schedule running requests in order of admission. A request that can get no tokens is
        skipped and blocks no other.
        """
        running = self.running
        remote = self.remote
        allocate_slots = self.kv_cache_manager.allocate_slots
        num_lookahead_tokens = self.drafting.num_lookahead_tokens
        continue_running = step.continue_running
        while step.position < len(running) and step.token_budget > 0:
            request = running[step.position]
            # With async scheduling, placeholders stand for tokens that a step in flight is
            # sampling.
            num_placeholders = request.num_output_placeholders
            num_new_tokens = request.num_tokens_with_spec + num_placeholders - request.num_computed_tokens
            # A plain decode is one token, which no limit cuts; most requests of a step are decodes.
            if num_new_tokens > 1 or num_placeholders:
                num_new_tokens = self.cap_num_tokens(request, num_new_tokens, step)
            if num_new_tokens == 0:
                step.position += 1
                continue
            # Preempt others until the blocks are there, or until the request itself is the victim.
            while True:
                new_blocks = allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens)
                if new_blocks is not None:
                    break
                # Blocks that wait for a copy to host memory are cheaper to give up than a request's
                # progress.
                if remote is not None and remote.connector.release_gpu_blocks():
                    continue
                victim = self.policy.victim(running, self.config.policy, self.kv_cache_manager.req_to_blocks)
                self.preempt(victim, step)
                if victim is request:
                    break
            if new_blocks is None:
                continue  # It preempted itself. The next request, if any, is at its position now.
            continue_running(request, num_new_tokens, new_blocks)
            step.position += 1

    def cap_num_tokens(self, request: Request, num_new_tokens: int, step: Step) -> int:
        """Return how many of its missing tokens a running request may get in this step."""
        # Draft tokens must not take the last position: the token sampled after it would exceed
        # max_model_len.
        up_to_last = self.config.max_model_len - 1 - request.num_computed_tokens
        return min(self.policy.running_tokens(num_new_tokens, step.chunk_limit, step.token_budget), up_to_last)

    def preempt(self, request: Request, step: Step) -> None:
        """Free a running request's blocks and put it back into the queue (FCFS: at the head). It
        keeps its tokens.
        """
        # FCFS always takes the last one, so do not search the list for it.
        position = len(self.running) - 1 if request is self.running[-1] else self.running.index(request)
        del self.running[position]
        # The requests behind it move up by one.
        if position < step.position:
            step.position -= 1
        # Its tokens were published when they were scheduled, and will not be computed now.
        was_scheduled = step.unschedule(request)
        self.kv_cache_manager.free(request, withdraw_uncomputed=was_scheduled)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.prepend_requests((request,))
        step.preempted_req_ids.add(request.request_id)

    def schedule_waiting(self, step: Step) -> None:
        """Admit waiting requests, but first those that have received keys and values from
        elsewhere.
        """
        if self.config.static_batching and self.running:
            return
        if (self.remote is None or self._schedule_received(step)) and self.waiting:
            self._admit_from(self.waiting, step)

    def _schedule_received(self, step: Step) -> bool:
        """Admit requests whose load has finished; return whether others may be admitted after them.

        They go first, whatever their priority, because their blocks are of no use until they have
        run. Others do not wait for those that could not run even if all running requests ended,
        because pinned adapters hold all slots.
        """
        assert self.remote is not None
        # What comes back here has received nothing, and starts again as a waiting request.
        self.waiting.prepend_requests(self.remote.promote())
        if self.remote.received:
            self._admit_from(self.remote.received, step)
        return all(self._is_blocked(request, self.pinned_loras) for request in self.remote.received)

    def _admit_from(self, queue: RequestQueue, step: Step) -> None:
        """Admit requests from a queue. A request that does not fit blocks those behind it.

        A request that waits for its grammar, a LoRA slot or a KV connector's answer blocks no
        other.
        """
        skipped: list[Request] = []
        # Computed once and kept up to date below: it goes through all running requests.
        running_loras = self.running_loras()
        while queue and step.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = queue.peek_request()
            if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                self._take_grammar(request)
            if request.status.is_finished:
                continue
            if self._is_blocked(request, running_loras):
                skipped.append(queue.pop_request())
                continue
            admitted = self.admit(queue, step)
            if admitted is None:
                skipped.append(queue.pop_request())
                continue
            if not admitted:
                break
            if request.lora_request:
                running_loras.add(request.lora_request.lora_int_id)
        # Those that were skipped keep their places at the head of the queue.
        queue.prepend_requests(skipped)

    def running_loras(self) -> set[int]:
        """Return the adapters that need a slot: those of all running requests, scheduled or not,
        and pinned ones.
        """
        if not self.config.max_loras:
            return set()
        running = {request.lora_request.lora_int_id for request in self.running if request.lora_request}
        return running | self.pinned_loras

    def _take_grammar(self, request: Request) -> None:
        """Make a request ready once its grammar is compiled; end it if the compilation has failed."""
        structured_request = request.structured_output_request
        assert structured_request is not None
        if structured_request.is_pending():
            return
        failure = structured_request.failure()
        if failure is None:
            request.status = RequestStatus.WAITING
            return
        self.finish_requests((request.request_id,), RequestStatus.FINISHED_ERROR)
        self._failed.append(EngineCoreOutput.failed(request.request_id, failure, invalid_request=True))

    def _is_blocked(self, request: Request, running_loras: set[int]) -> bool:
        """Return whether a waiting request must keep waiting: its grammar is not compiled, or the
        policy refuses it.
        """
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        return not self.policy.may_admit(request, running_loras, self.config.max_loras)

    def admit(self, queue: RequestQueue, step: Step) -> bool | None:
        """Admit the head of a waiting queue: schedule it, or let it load keys and values first.

        Return False, and change nothing, if it does not fit, or None if a KV connector does not
        know its prefix yet.
        """
        request = queue.peek_request()
        if self.remote is None:
            prefix = self.policy.find_prefix(request, self.kv_cache_manager)
        elif (prefix := self.remote.find_prefix(request)) is None:
            return None
        num_new_tokens = 0
        if not prefix.loads_async:
            num_missing = request.num_tokens - prefix.num_tokens
            num_new_tokens = self.policy.admitted_tokens(
                num_missing, step.chunk_limit, step.token_budget, self.config.enable_chunked_prefill
            )
            if num_new_tokens == 0:
                return False
        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            new_computed_blocks=prefix.blocks,
            num_lookahead_tokens=0 if prefix.loads_async else self.drafting.num_lookahead_tokens,
            num_external_computed_tokens=prefix.num_external,
            delay_cache_blocks=prefix.loads_async,
            reserved_blocks=self.remote.num_reserved_blocks(self.running) if self.remote and prefix.loads_async else 0,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
            # The watermark applies only while others run: an empty engine must admit any request
            # that fits.
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return False
        # A request that has loaded its prefix was counted when it looked it up.
        if request.num_computed_tokens == 0:
            self.kv_cache_manager.record_prefix_cache_stats(request, prefix.num_local)
        if self.remote is not None:
            self.remote.allocated(request, prefix)
            # Nothing is computed in this step for a request that loads; it only gets its blocks.
            if prefix.loads_async:
                queue.pop_request()
                return True
        self.running.append(queue.pop_request())
        self._start_running(request, step, prefix.num_tokens, num_new_tokens)
        return True

    def _start_running(self, request: Request, step: Step, num_found: int, num_new_tokens: int) -> None:
        """Add an admitted request to the step, to be computed after the `num_found` tokens of its
        prefix.
        """
        # Otherwise it was preempted, and what is not found again is computed for a second time.
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_found
        else:
            self.num_recomputed_tokens += max(0, request.num_lost_tokens - num_found)
            request.num_lost_tokens = 0
        request.num_computed_tokens = num_found
        request.status = RequestStatus.RUNNING
        step.num_scheduled_tokens[request.request_id] = num_new_tokens
        step.token_budget -= num_new_tokens
        step.admitted.append(request)

    def _make_output(self, step: Step) -> SchedulerOutput:
        get_block_ids = self.kv_cache_manager.get_block_ids
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData.from_request(request, get_block_ids(request.request_id)) for request in step.admitted
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in step.continued],
                new_block_ids=[step.new_block_ids.get(request.request_id) for request in step.continued],
                num_computed_tokens=[request.num_computed_tokens for request in step.continued],
            ),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=self.config.max_num_batched_tokens - step.token_budget,
            scheduled_spec_decode_tokens=step.spec_token_ids,
            preempted_req_ids=step.preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
        )

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        # Updated before the forward pass, so that the next step can be scheduled while this one is
        # computed.
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num_tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
            if request.structured_output_request is not None and request.samples_by_grammar:
                output.has_structured_output_requests = True
        self.finished_req_ids = set()

    # Processing the output of a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Process the sampled tokens of a step: roll back rejected draft tokens, append tokens, end
        requests.

        Return one output per request that sampled tokens, in scheduling order; aborted requests
        have none. The outputs of requests whose grammar or load has failed come before them.
        """
        report = model_runner_output.kv_connector_output
        if self.remote is not None and report is not None:
            failed = [request.request_id for request in self.remote.take_failed(report)]
            self.finish_requests(failed, RequestStatus.FINISHED_ERROR)
            self._failed += [EngineCoreOutput.failed(request_id, LOAD_FAILED) for request_id in failed]
        outputs, self._failed = self._failed, []
        stopped: list[Request] = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            sampled = model_runner_output.sampled_token_ids.get(request_id)
            # It was aborted while the step ran, or its prompt is not complete.
            if request is None or not sampled:
                continue
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
            if drafts:
                num_invalid = model_runner_output.num_invalid_spec_tokens.get(request_id, 0)
                self._roll_back_rejected(request, len(drafts), len(sampled) - 1, num_invalid)
            new_token_ids, has_stopped = self._update_request_with_output(request, sampled)
            if drafts:
                self._cache_accepted(request)
            output = EngineCoreOutput(request_id, new_token_ids, request.num_cached_tokens)
            if has_stopped:
                stopped.append(request)
                output.finish_reason, output.stop_reason = request.status.finish_reason, request.stop_reason
                output.num_preemptions = request.num_preemptions
                output.error, output.invalid_request = request.error, request.error is not None
            if request_id in model_runner_output.logprobs:
                output.new_logprobs = model_runner_output.logprobs[request_id][: len(new_token_ids)]
            output.new_prompt_logprobs = model_runner_output.prompt_logprobs.get(request_id)
            outputs.append(output)
        self._finish(stopped)
        if self.remote is not None:
            self.remote.end_update(report, outputs)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Mapping[str, list[int]]) -> None:
        """Set the draft tokens to verify in the next step, by request id. Ignored for unfinished
        prefills.
        """
        for request_id, drafts in draft_token_ids.items():
            if len(drafts) > self.drafting.num_speculative_tokens:
                raise MinivllmError(
                    f"{len(drafts)} drafts for request {request_id!r}; num_speculative_tokens is "
                    f"{self.drafting.num_speculative_tokens}"
                )
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING and not request.is_prefill_chunk:
                structured_request = request.structured_output_request
                request.spec_token_ids = (
                    structured_request.grammar.validate_tokens(drafts) if structured_request else drafts
                )

    def _roll_back_rejected(self, request: Request, num_drafts: int, num_accepted: int, num_invalid: int) -> None:
        # Keys and values of rejected draft tokens stay in the blocks as garbage; the next tokens
        # overwrite them.
        request.num_computed_tokens -= num_drafts - num_accepted
        if num_drafts > num_invalid:
            self.spec_decoding_stats.observe_draft(num_drafts - num_invalid, num_accepted)

    def _cache_accepted(self, request: Request) -> None:
        """Publish the blocks filled by accepted draft tokens, which are known tokens now."""
        # The last token is not computed yet.
        self.kv_cache_manager.cache_blocks(request, request.num_tokens - 1)

    def _update_request_with_output(self, request: Request, sampled: list[int]) -> tuple[list[int], bool]:
        """Append sampled tokens up to the one that ends the request; return those kept, and whether
        it has ended.
        """
        for num_kept, token_id in enumerate(sampled, start=1):
            request.append_output_token_id(token_id)
            has_stopped = check_stop(request, token_id, self.config.max_model_len)
            if request.structured_output_request is not None:
                has_stopped = check_grammar(request, token_id) or has_stopped
            if has_stopped:
                return sampled[:num_kept], True
        return sampled, False

    def _finish(self, requests: Sequence[Request], status: RequestStatus | None = None) -> None:
        """Free requests and remove them from `running`; set their status if `status` is given."""
        if not requests:
            return
        for request in requests:
            # No worker knows a request that waits, but a KV connector must hear of all.
            if request.status is RequestStatus.RUNNING or request.status.is_finished or self.remote is not None:
                self.finished_req_ids.add(request.request_id)
            # A request that stopped by itself has its status already.
            request.status = status or request.status
            if self.remote is None or not self.remote.keeps_blocks(request):
                self.kv_cache_manager.free(request)
            del self.requests[request.request_id]
        self.running = [request for request in self.running if not request.status.is_finished]

    def _make_kv_cache_manager(self) -> KVCacheManager:
        return KVCacheManager(
            self.cache_config,
            self.config.max_model_len,
            self.config.watermark,
            self.policy.block_pool,
            use_eagle=self.drafting.use_eagle,
        )
