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

A load that fails while its request waits costs only that request what it should have brought: no
other request can have found these blocks. A load that fails within a step spoils the step, since blocks are
published when they are scheduled: other requests may have found the invalid ones, or blocks that
were computed after them. Then the engine starts over, as after any failed step.

In vLLM v0.33.0 these are methods of `Scheduler` in `vllm/v1/core/sched/scheduler.py`
(`_update_waiting_for_remote_kv`, `_update_from_kv_xfer_finished`,
`_update_requests_with_invalid_blocks`, `_inflight_prefill_reserved_blocks`, `_connector_finished`).
Two things differ on purpose. After a failed load the connector is not asked about that request
again, since it might promise the same forever. And vLLM cuts each request back to its valid tokens,
where ours starts over or computes here all that was to be loaded.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
        self._loads: dict[str, list[int]] = {}
        """The blocks that requests load within the step, and those after them."""
        self._loads_in_flight: deque[dict[str, list[int]]] = deque()
        """The loads of each step in flight, the oldest first."""
        self._numbers = count()
        self._params: dict[str, KVTransferParams] = {}
        connector.bind_gpu_block_pool(manager.block_pool)

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
        elif prefix.num_external:
            first = prefix.num_local // self.manager.block_size
            self._loads[request.request_id] = [block.block_id for block in blocks[first:]]

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
        if delays:
            self.releasing[name] = request
        return delays

    # A step

    def complete(self, output: SchedulerOutput) -> None:
        """Add to a step the transfers that the ranks are to make."""
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        self._loads_in_flight.append(self._loads)
        self._loads = {}

    def failed_loads(self, output: KVConnectorOutput, requests: Mapping[str, Request]) -> list[str]:
        """Return the requests that end because of invalid blocks in the oldest step in flight: those
        whose own load has failed, if tokens are not recomputed. `requests` are all unfinished ones.
        """
        loads = self._loads_in_flight[0]
        failed = [name for name in loads if name in requests and not output.invalid_block_ids.isdisjoint(loads[name])]
        self._never_again.update(failed)
        return [] if self.recomputes else failed

    def take_failed(self, output: KVConnectorOutput) -> list[Request]:
        """Discard what the failed loads of waiting requests should have brought; return the requests
        that end because of it.
        """
        failed = [self.kv_holding_waiting[name] for name in output.failed_recving if name in self.kv_holding_waiting]
        for request in failed:
            request.num_computed_tokens -= request.num_external_computed_tokens
            request.num_external_computed_tokens = 0
            self._never_again.add(request.request_id)
        return [] if self.recomputes else failed

    def end_update(self, output: KVConnectorOutput | None, request_outputs: Iterable[EngineCoreOutput]) -> None:
        """Process finished transfers, and add the connector's parameters for the clients of ended
        requests to their outputs.
        """
        self._loads_in_flight.popleft()
        if output is not None:
            self.end_transfers(output)
        # Only a few steps end a request that has parameters for its client.
        if self._params:
            for request_output in request_outputs:
                request_output.kv_transfer_params = self._params.get(request_output.request_id)
            self._params = {}

    def end_transfers(self, output: KVConnectorOutput) -> None:
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
        self._loads = {}
        self._loads_in_flight.clear()
        self.received = self._queue()
        self.manager = manager
        self.connector.bind_gpu_block_pool(manager.block_pool)
        self.connector.start_over()
