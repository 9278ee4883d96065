"""The scheduler's dealings with a KV connector: requests that wait for keys and values, and blocks
still in use.

A request whose prefix comes from elsewhere is in one of these places:

    waiting ──▶ kv_holding_waiting ──▶ received ──▶ running
                WAITING_FOR_REMOTE_KVS

Received requests go first, whatever the policy: otherwise one that does not fit until they have
ended could block them forever. They go in the order of their admission, not of their arrival,
because each admission left room for all earlier ones. A request holds blocks from the start,
without hashes until they are filled; `num_computed_tokens` counts the tokens to come. A connector
that loads within the step that admits a request needs none of this: the request runs at once.

An ended request's blocks may be kept until the ranks report them sent; those of a request that
was aborted while it waited, until the ranks report that nothing is written into them any more.

In vLLM v0.33.0 these are methods of `Scheduler` in `vllm/v1/core/sched/scheduler.py`
(`_update_waiting_for_remote_kv`, `_update_from_kv_xfer_finished`,
`_update_requests_with_invalid_blocks`, `_inflight_prefill_reserved_blocks`, `_connector_finished`).
Two things differ on purpose. After a failed load the connector is not asked about that request
again, since it might promise the same forever. And a running request with an invalid block is
preempted, where vLLM recomputes it in place: blocks are published when they are scheduled, so other
requests may have found the invalid block, or blocks that were computed after it, and all of them
have to look up their prefix again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorOutput, KVTransferParams
from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import PriorityRequestQueue
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.core.stats import PrefixCacheStats

LOAD_FAILED = 'its keys and values could not be loaded from elsewhere, and kv_load_failure_policy is "fail"'


class Prefix(NamedTuple):
    """The part of a request that needs no computing: the `blocks` of `num_local` cached tokens, and
    `num_external` tokens from elsewhere.

    `loads_async`: the external tokens are loaded while other steps run.
    """

    blocks: Sequence[KVCacheBlock]
    num_local: int
    num_external: int = 0
    loads_async: bool = False

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prefix, local and external."""
        return self.num_local + self.num_external


class RemoteKV:
    """The state of those requests of a scheduler that a connector serves. `recomputes`: tokens
    whose load fails are computed here.
    """

    def __init__(self, connector: KVConnectorBase_V1, manager: KVCacheManager, recomputes: bool) -> None:
        self.connector = connector
        self.manager = manager
        self.recomputes = recomputes
        self.kv_holding_waiting: dict[str, Request] = {}
        self._admissions: dict[str, int] = {}
        """The number of its admission, for each request that loads or has loaded."""
        self.received = self._queue()
        self.finished_recving_kv_req_ids: set[str] = set()
        self.releasing: dict[str, Request] = {}
        """Requests that have ended, and whose blocks are still needed."""
        self.connector_prefix_cache_stats = PrefixCacheStats()
        self._being_sent: set[str] = set()
        self._being_received: set[str] = set()  # of those in `releasing`
        self._never_again: set[str] = set()
        self._numbers = count()
        self._params: dict[str, KVTransferParams] = {}
        self._forget_steps()
        connector.bind_gpu_block_pool(manager.block_pool)

    def _forget_steps(self) -> None:
        # By request: how many steps in flight compute with its blocks, and of how many of these the
        # tokens are invalid.
        self._in_flight: Counter[str] = Counter()
        self._stale: Counter[str] = Counter()
        # By request: a block table that it has lost while a step in flight computes with it.
        self._lost_tables: dict[str, list[int]] = {}

    def _queue(self) -> PriorityRequestQueue:
        """Return a queue in order of admission, for requests whose blocks are filled."""
        return PriorityRequestQueue(lambda request: self._admissions[request.request_id])

    def is_busy(self) -> bool:
        """Return whether the engine must keep stepping although no request is unfinished."""
        return bool(self.releasing) or self.connector.has_pending_block_frees()

    # Admission

    def find_prefix(self, request: Request) -> Prefix | None:
        """Return the longest prefix available to a waiting request, here and elsewhere; None if the
        connector does not know yet.
        """
        if request.num_computed_tokens > 0:
            return Prefix((), request.num_computed_tokens)  # it was loaded, and lies in its blocks
        blocks, num_local = self.manager.get_computed_blocks(request)
        # The last token is always computed, so a prompt of one token has nothing to find.
        computes_all = request.skip_reading_prefix_cache or request.num_tokens == 1
        if computes_all or request.request_id in self._never_again:
            return Prefix(blocks, num_local)
        num_external, loads_async = self.connector.get_num_new_matched_tokens(request, num_local)
        if num_external is None:
            return None
        most = request.num_tokens - num_local - (not loads_async)  # the last token is computed in any case
        # A connector may count more tokens than the request can use, or fewer than none.
        num_external = max(0, min(num_external, most))
        return Prefix(blocks, num_local, num_external, loads_async and num_external > 0)

    def num_reserved_blocks(self, running: Iterable[Request]) -> int:
        """Return how many blocks the prompts in progress, running or being loaded, still need.

        A loading request holds its blocks without making progress and cannot be preempted, so it
        must not take these.
        """
        # Decodes are left out: they can be preempted if the pool runs short.
        prefills = (request for request in running if request.num_computed_tokens < request.num_tokens)
        others = (*prefills, *self.kv_holding_waiting.values(), *self.received)
        return sum(map(self.manager.num_missing_blocks, others))

    def allocated(self, request: Request, prefix: Prefix) -> None:
        """Tell the connector that a request has its blocks, and hold the request back if they are
        to be filled while others run.
        """
        # The whole table, not only the new blocks: the connector needs to know where the cached
        # ones end.
        blocks = self.manager.req_to_blocks.get(request.request_id, [])
        self.connector.update_state_after_alloc(request, blocks, prefix.num_external)
        if request.num_computed_tokens > 0:
            return
        request.num_external_computed_tokens = prefix.num_external
        self.connector_prefix_cache_stats = self.connector_prefix_cache_stats.with_lookup(
            request.num_tokens - prefix.num_local, prefix.num_external, request.num_preemptions > 0
        )
        if prefix.loads_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = prefix.num_tokens
            self.kv_holding_waiting[request.request_id] = request
            self._admissions[request.request_id] = next(self._numbers)

    def promote(self) -> list[Request]:
        """Move requests whose load has finished into `received`.

        Return those that have received nothing and no longer hold any blocks.
        """
        arrived = [
            request for name, request in self.kv_holding_waiting.items() if name in self.finished_recving_kv_req_ids
        ]
        for request in arrived:
            self._take_loaded(request)
        self.received.prepend_requests([request for request in arrived if request.num_computed_tokens > 0])
        return [request for request in arrived if request.num_computed_tokens == 0]

    def _take_loaded(self, request: Request) -> None:
        """Publish the blocks of a finished load, or free them if nothing valid arrived."""
        name = request.request_id
        del self.kv_holding_waiting[name]
        self.finished_recving_kv_req_ids.remove(name)
        if request.num_computed_tokens > 0:
            self.manager.cache_blocks(request, request.num_computed_tokens)
        else:
            self.manager.free(request)
        # The logits of the last token are needed.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING

    # The end of a request

    def keeps_blocks(self, request: Request) -> bool:
        """Tell the connector that a request has ended; return whether its blocks are still
        needed.
        """
        name = request.request_id
        # Ask while the blocks are still the request's.
        delays, params = self.connector.request_finished(request, self.manager.get_block_ids(name))
        if params is not None:
            self._params[name] = params
        if delays:
            self._being_sent.add(name)
        # An aborted load may still write into its blocks, so nobody else may have them yet.
        if self.kv_holding_waiting.pop(name, None) and name not in self.finished_recving_kv_req_ids:
            self._being_received.add(name)
            delays = True
        self.finished_recving_kv_req_ids.discard(name)
        self._never_again.discard(name)
        self._admissions.pop(name, None)
        self.lost_its_blocks(request)
        if delays:
            self.releasing[name] = request
        return delays

    def lost_its_blocks(self, request: Request) -> None:
        """Remember the block table of a request that is preempted or has ended, if a step in flight
        computes with it. Call this before the blocks are freed.
        """
        # Should one of these blocks turn out to be invalid, those after it must be withdrawn.
        if self._in_flight[request.request_id]:
            self._lost_tables[request.request_id] = self.manager.get_block_ids(request.request_id)

    # A step

    def complete(self, output: SchedulerOutput) -> None:
        """Add to a step the transfers that the ranks are to make."""
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        self._in_flight.update(output.num_scheduled_tokens.keys())

    def begin_update(
        self, step: SchedulerOutput, output: KVConnectorOutput | None, requests: Mapping[str, Request]
    ) -> tuple[set[str], list[Request], list[Request]]:
        """Process failed loads, before the step's tokens; `requests` are all unfinished requests.

        Return the ids of those whose tokens of this step are invalid, the requests to end, and the
        running requests to preempt.
        """
        invalid = self._take_stale(step)
        ended: list[Request] = []
        running: list[Request] = []
        if output is not None and (output.invalid_block_ids or output.failed_recving):
            if not self.recomputes:
                ended = [requests[name] for name in self._failed_loads(step, output, requests)]
            # Requests that only load must be cut first: running ones may have found their blocks.
            for request in self.kv_holding_waiting.values():
                self._truncate(request, output)
            running = self._withdraw(output.invalid_block_ids, requests)
            spoiled = [request.request_id for request in running]
            if output.invalid_block_ids:
                # A request that was preempted meanwhile has lost its blocks, so it is not known any
                # more whether they were valid.
                spoiled += [
                    name
                    for name in step.num_scheduled_tokens
                    if name in requests and requests[name].status is RequestStatus.PREEMPTED
                ]
            # What was scheduled before this was known computes with invalid keys and values.
            for name in spoiled:
                requests[name].num_output_placeholders = 0
                self._stale[name] = self._in_flight[name]
            invalid.update(spoiled)
        if self._lost_tables:
            self._lost_tables = {name: table for name, table in self._lost_tables.items() if self._in_flight[name]}
        return invalid, ended, [request for request in running if request not in ended]

    def _failed_loads(
        self, step: SchedulerOutput, output: KVConnectorOutput, requests: Mapping[str, Request]
    ) -> list[str]:
        """Return the requests whose own load has failed, loading or running; others may only have
        found its blocks.
        """
        size = self.manager.block_size
        loads = {
            name: (self.manager.get_block_ids(name), request.num_computed_tokens)
            for name, request in self.kv_holding_waiting.items()
        }
        # A load within the step: these are the tables as they were when the ranks got them.
        for new in step.scheduled_new_reqs:
            request = requests.get(new.req_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                loads[new.req_id] = (new.block_ids, new.num_computed_tokens)
        failed = []
        for name, (table, stop) in loads.items():
            start = stop - requests[name].num_external_computed_tokens
            loaded = table[-(-start // size) : -(-stop // size)]
            if name in output.failed_recving or not output.invalid_block_ids.isdisjoint(loaded):
                failed.append(name)
        return failed

    def end_update(self, output: KVConnectorOutput | None, request_outputs: Iterable[EngineCoreOutput]) -> None:
        """Process finished transfers, and add the connector's parameters for the clients of ended
        requests to their outputs.
        """
        if output is not None:
            self._end_transfers(output)
        # Only a few steps end a request that has parameters for its client.
        if self._params:
            for request_output in request_outputs:
                request_output.kv_transfer_params = self._params.get(request_output.request_id)
            self._params = {}

    def _end_transfers(self, output: KVConnectorOutput) -> None:
        """Note which loads have arrived, and free the blocks of ended requests that are no longer
        needed.
        """
        self.connector.update_connector_output(output)
        for name in output.finished_recving:
            if name in self.kv_holding_waiting:
                self.finished_recving_kv_req_ids.add(name)
            self._being_received.discard(name)
        # Blocks are free only when nobody reads them and nobody writes them any more.
        self._being_sent -= output.finished_sending
        for name in output.finished_recving | output.finished_sending:
            if name in self.releasing and name not in self._being_received | self._being_sent:
                self.manager.free(self.releasing.pop(name))

    def _take_stale(self, step: SchedulerOutput) -> set[str]:
        """Return those requests of a step that turned out, while it was in flight, to have computed
        with invalid blocks.
        """
        names = step.num_scheduled_tokens.keys()
        stale = {name for name in names if self._stale[name] > 0}
        self._stale.subtract(stale)
        self._in_flight.subtract(names)
        # Unary plus drops the entries that have come to zero.
        self._stale, self._in_flight = +self._stale, +self._in_flight
        return stale

    def _truncate(self, request: Request, output: KVConnectorOutput) -> None:
        """Reduce a loading request's computed tokens to the valid ones."""
        name = request.request_id
        num_valid = request.num_computed_tokens
        if name in output.failed_recving:
            num_valid -= request.num_external_computed_tokens
        # Only the blocks that should hold something can be invalid.
        block_ids = self.manager.get_block_ids(name)[: -(-num_valid // self.manager.block_size)]
        num_valid = min(num_valid, _first_of(output.invalid_block_ids, block_ids) * self.manager.block_size)
        num_lost = request.num_computed_tokens - num_valid
        if num_lost == 0:
            return
        # Local blocks may be lost too: another request's load into them has failed.
        request.num_external_computed_tokens = max(0, request.num_external_computed_tokens - num_lost)
        request.num_computed_tokens = num_valid
        self._never_again.add(name)

    def _withdraw(self, invalid_block_ids: set[int], requests: Mapping[str, Request]) -> list[Request]:
        """Withdraw the hashes of invalid blocks, and of the blocks after them in any table, which
        were computed with them. Return the running requests that hold one; others that do look up
        their prefix again.
        """
        if not invalid_block_ids:
            return []
        size = self.manager.block_size
        tables = {
            name: self.manager.get_block_ids(name)[: -(-request.num_computed_tokens // size)]
            for name, request in requests.items()
        }
        invalid = set(invalid_block_ids)
        starts: dict[str, int] = {}
        num_known = 0
        # A table may continue with another request's block, so repeat until nothing is added.
        while num_known < len(invalid):
            num_known = len(invalid)
            starts = {name: _first_of(invalid, table) for name, table in tables.items()}
            invalid.update(*(tables[name][start:] for name, start in starts.items()))
            invalid.update(*(table[_first_of(invalid, table) :] for table in self._lost_tables.values()))
        blocks = self.manager.block_pool.blocks
        self.manager.block_pool.evict_blocks(blocks[block_id] for block_id in invalid)
        affected = [requests[name] for name, start in starts.items() if start < len(tables[name])]
        for request in affected:
            request.num_cached_tokens = min(request.num_cached_tokens, starts[request.request_id] * size)
            if request.status is not RequestStatus.RUNNING:
                request.num_computed_tokens = request.num_external_computed_tokens = 0
                if request.request_id not in self.kv_holding_waiting:
                    self.manager.free(request)
        running = [request for request in affected if request.status is RequestStatus.RUNNING]
        self._never_again.update(request.request_id for request in running)
        return running

    def start_over(self, manager: KVCacheManager, lost: Iterable[Request]) -> None:
        """Switch to a manager with a new pool after a failed step, which ended the `lost` requests.

        Blocks that are being sent are kept, because earlier steps computed what they hold. Loads
        are abandoned.
        """
        for request in lost:
            self.connector.request_finished(request, [])
            self._never_again.discard(request.request_id)
        for name in self._being_sent & self.releasing.keys():
            # The new pool has the same block ids, and the memory behind them was not touched.
            blocks = [manager.block_pool.blocks[block_id] for block_id in self.manager.get_block_ids(name)]
            manager.block_pool.touch(blocks)
            manager.req_to_blocks[name] = blocks
        self.releasing = {name: request for name, request in self.releasing.items() if name in self._being_sent}
        self._never_again.update(self.kv_holding_waiting.keys())
        self._being_received.clear()
        self.finished_recving_kv_req_ids.clear()
        self.kv_holding_waiting.clear()
        self._admissions.clear()
        self.received = self._queue()
        self._forget_steps()
        self.manager = manager
        self.connector.bind_gpu_block_pool(manager.block_pool)
        self.connector.start_over()


def _first_of(block_ids: Collection[int], table: Sequence[int]) -> int:
    """Return the index of the first block of a table that is one of these; its length if none is."""
    return next((index for index, block_id in enumerate(table) if block_id in block_ids), len(table))
