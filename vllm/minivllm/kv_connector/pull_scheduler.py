"""The scheduler's side of connectors that pull: which blocks are kept for others, and which are
read from others.

On a prefill engine a request with `do_remote_decode` keeps its blocks when it ends, for as long as
its lease runs, and its client learns where they are. On a decode engine a request with
`do_remote_prefill` waits while the ranks read what the prefix cache lacks. Each remote request is
read once and released once, however many requests here use it (with n > 1, say): one of them reads,
the others wait and find its blocks in the prefix cache; if all leave before anything was read, the
last one tells the prefill engine.

In vLLM v0.33.0: `NixlPullConnectorScheduler` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py`, `base_scheduler.py`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

from minivllm.core.kv_connector import (
    KVConnectorBase_V1,
    KVConnectorConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferParams,
)
from minivllm.core.request import Request, RequestStatus
from minivllm.errors import MinivllmError
from minivllm.kv_connector.pull_leases import HEARTBEATS_PER_LEASE
from minivllm.kv_connector.pull_params import RemotePrefill, check_flags, digest

if TYPE_CHECKING:
    from minivllm.core.block_pool import KVCacheBlock
    from minivllm.core.scheduler_output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """An order to every rank: read tokens `start` to `end` of `remote`; `block_ids[0]` begins
    with token `start`.
    """

    remote: RemotePrefill
    block_ids: tuple[int, ...]
    start: int
    end: int


@dataclass
class PullConnectorMetadata(KVConnectorMetadata):
    """Orders to the ranks for one step, by request id.

    - `reqs_to_recv`: requests to read. `reqs_to_release`: requests not needed, which the prefill
      engine must learn.
    - `reqs_to_send`: the blocks kept for each request; no others can be read. One may be sent
      twice.
    - `heartbeats`: requests whose leases are to be renewed.
    """

    reqs_to_recv: dict[str, ReadOrder] = field(default_factory=dict)
    reqs_to_release: dict[str, RemotePrefill] = field(default_factory=dict)
    reqs_to_send: dict[str, list[int]] = field(default_factory=dict)
    heartbeats: list[RemotePrefill] = field(default_factory=list)


@dataclass(slots=True)
class _Claim:
    """The requests here that share one remote request. `reader` is the one that reads it; `is_over`
    means that it was read, lost or released.
    """

    remote: RemotePrefill
    members: set[str] = field(default_factory=set)
    reader: str | None = None
    is_over: bool = False


class PullConnectorScheduler(KVConnectorBase_V1):
    """The base of the scheduler sides that pull. Subclasses set the address at which other engines
    reach them: `host`, `port`, and a `generation` if any.
    """

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole, lease_duration: float) -> None:
        super().__init__(config, role)
        self.lease_duration = lease_duration
        self.host = ""
        self.port = 0
        self.generation = ""
        # Read by the side channel's thread too: each operation on it is atomic.
        self._held: dict[str, list[int]] = {}
        self._claims: dict[RemotePrefill, _Claim] = {}
        self._claim_of: dict[str, _Claim] = {}
        self._last_heartbeat = float("-inf")
        # Releases that not all ranks have sent yet, and how many ranks have not.
        self._untold: dict[str, tuple[RemotePrefill, int]] = {}
        self._next = PullConnectorMetadata()

    def is_held(self, request_id: str) -> bool:
        """Return whether this request's blocks are kept for others; may be called from any thread."""
        return request_id in self._held

    def on_new_request(self, request: Request) -> None:
        """Claim the remote request, if any; raise `MinivllmError` for params that no prefill engine
        would send.
        """
        params = request.kv_transfer_params
        role = self.config.kv_transfer_config
        if params is None:
            return
        takes, gives = check_flags(params)
        if (takes and not role.is_kv_consumer) or (gives and not role.is_kv_producer):
            asked, needed = ("do_remote_prefill", "kv_consumer") if takes else ("do_remote_decode", "kv_producer")
            raise MinivllmError(
                f"{asked} is for an engine whose kv_role is {needed!r} or 'kv_both'; here kv_role is {role.kv_role!r}"
            )
        if not takes:
            return
        remote = RemotePrefill.of(params)
        # Several requests may use one remote prompt, as with n > 1: they share its claim.
        claim = self._claims.setdefault(remote, _Claim(remote))
        claim.members.add(request.request_id)
        self._claim_of[request.request_id] = claim
        # Keys and values of another prompt would be used, and published, without a sign.
        if not remote.is_of(request.prompt_token_ids):
            self._leave(request.request_id)
            raise MinivllmError(
                "kv_transfer_params are those of another prompt; send those that the prefill engine sent for this one"
            )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of prompt tokens to read from the prefill engine; None while another
        request is reading the same blocks.
        """
        claim = self._claim_of.get(request.request_id)
        if claim is None or claim.is_over:
            return 0, False
        # Another request reads the same blocks. Once they are here, the prefix cache has them.
        if claim.reader not in (None, request.request_id):
            return None, False
        # Older engines do not say how many tokens they have computed: then it is the whole prompt.
        there = request.num_prompt_tokens if claim.remote.num_tokens is None else claim.remote.num_tokens
        num_missing = min(there, request.num_prompt_tokens) - num_computed_tokens
        return (num_missing, True) if num_missing > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """Order the read. A request that finds everything in the prefix cache releases the remote
        blocks.
        """
        claim = self._claim_of.get(request.request_id)
        if claim is None or claim.is_over:
            return
        if num_external_tokens == 0:
            self._leave(request.request_id)
            return
        # Blocks with a hash come from the prefix cache and are filled already; only those behind
        # them are read.
        num_cached = sum(1 for _ in takewhile(lambda block: block.block_hash is not None, blocks))
        start = num_cached * self.config.block_size
        block_ids = tuple(block.block_id for block in blocks[num_cached:])
        claim.reader = request.request_id
        order = ReadOrder(claim.remote, block_ids, start, start + num_external_tokens)
        self._next.reqs_to_recv[request.request_id] = order

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PullConnectorMetadata:
        """Return the orders since the last call, with heartbeats, which are sent six times per
        lease duration.
        """
        metadata, self._next = self._next, PullConnectorMetadata()
        now = time.monotonic()
        # Whatever is not read yet must still be there when its turn comes.
        waiting = [claim.remote for claim in self._claims.values() if not claim.is_over]
        if waiting and now - self._last_heartbeat >= self.lease_duration / HEARTBEATS_PER_LEASE:
            self._last_heartbeat = now
            metadata.heartbeats = waiting
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Stop keeping blocks that were sent, and stop heartbeats for those that were read or lost."""
        for request_id in connector_output.finished_sending:
            self._held.pop(request_id, None)
        for request_id in connector_output.finished_recving:
            if claim := self._claim_of.get(request_id):
                claim.is_over = True
        # Each rank here tells its own peer, so all of them must have done so.
        for request_id in chain(*(connector_output.kv_connector_worker_meta or ())):
            remote, num_ranks = self._untold.pop(request_id, (None, 0))
            if remote is not None and num_ranks > 1:
                self._untold[request_id] = remote, num_ranks - 1

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """Keep the blocks of a prefill that finished normally; any other request's blocks are freed
        at once.
        """
        self._leave(request.request_id)
        params = request.kv_transfer_params
        if params is None or not params.get("do_remote_decode"):
            return False, None
        ended_well = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        # The sampled token is not computed, so nothing of it lies in the blocks.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        block_ids = block_ids[: -(-num_tokens // self.config.block_size)]
        # A request that was aborted or failed has nothing that another engine should use.
        if not ended_well or not block_ids:
            return False, None
        self._next.reqs_to_send[request.request_id] = block_ids
        self._held[request.request_id] = block_ids
        return True, self._answer(request, block_ids, num_tokens)

    def has_pending_block_frees(self) -> bool:
        """Return whether any prefill engine has yet to learn that its blocks are not needed."""
        return bool(self._untold)

    def start_over(self) -> None:
        """Start over after a failed step: the ranks have abandoned their reads, and all other
        orders are sent again.
        """
        self._next = PullConnectorMetadata()
        # The failed step may or may not have told the ranks which blocks to keep; to be told twice
        # does no harm.
        self._next.reqs_to_send = dict(self._held)
        for claim in self._claims.values():
            if claim.reader is not None and not claim.is_over:
                claim.is_over = True
                self._release(claim.reader, claim.remote)
        for request_id, (remote, _) in list(self._untold.items()):
            self._release(request_id, remote)

    def _leave(self, request_id: str) -> None:
        """Detach a request from its remote request. The last one to leave releases the remote
        blocks if they are unread.
        """
        claim = self._claim_of.pop(request_id, None)
        if claim is None:
            return
        claim.members.discard(request_id)
        if claim.reader == request_id:
            claim.is_over = True  # the ranks may still read; then they tell the prefill engine themselves
        # Others of this claim may still read.
        if claim.members:
            return
        self._claims.pop(claim.remote, None)
        if not claim.is_over:
            self._release(request_id, claim.remote)

    def _release(self, request_id: str, remote: RemotePrefill) -> None:
        self._next.reqs_to_release[request_id] = remote
        self._untold[request_id] = remote, self.config.tensor_parallel_size

    def _answer(self, request: Request, block_ids: list[int], num_tokens: int) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [block_ids],
            "remote_engine_id": self.config.kv_transfer_config.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.config.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,  # heartbeats renew the lease, so nobody knows
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.num_cached_tokens,
            "remote_registration_generation": self.generation,
            "remote_prompt_digest": digest(request.all_token_ids[:num_tokens]),
        }
