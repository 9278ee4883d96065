"""The ranks' side of NIXL's connector: reads blocks from other engines, and keeps its own while they are leased.

A read is over in five moves, none of which anybody waits for: the handshake with the other engine, if it is the
first; the READ; the question whether the blocks were still the request's when the last byte had come; the
notification that lets the other engine free them; the word to the scheduler. Each step of the engine looks how far
every read has come.

In vLLM v0.33.0: `NixlPullConnectorWorker` in `vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py`,
`base_worker.py`.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import torch

from minivllm.core.kv_connector import KVCaches, KVConnectorConfig
from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.agent import Transfer, TransferAgent
from minivllm.kv_connector.nixl.peers import LAYOUT_WITH_SCALES, PLAIN_LAYOUT, Peer, Peers, in_thread
from minivllm.kv_connector.nixl.pieces import piece_indices
from minivllm.kv_connector.nixl.side_channel import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    ask_is_held,
    compute_nixl_compatibility_hash,
)
from minivllm.kv_connector.nixl.stats import NixlKVConnectorStats
from minivllm.kv_connector.pull_leases import Leases, consumed_message, heartbeat_message
from minivllm.kv_connector.pull_params import RemotePrefill
from minivllm.kv_connector.pull_scheduler import PullConnectorMetadata, ReadOrder
from minivllm.logger import init_logger

logger = init_logger(__name__)
MakeAgent = Callable[[str], TransferAgent]
SECONDS_TO_CANCEL = 5.0


@dataclass(slots=True)
class _Read:
    """A read and how far it is. `deadline` in seconds of `time.monotonic()`."""

    order: ReadOrder
    peer: Peer | None = None
    transfer: Transfer | None = None
    deadline: float = 0.0
    is_held: "Future[bool] | None" = None


class NixlConnectorWorker:
    """See `KVConnectorBase_V1` for the methods that have no words here. One thread at a time may call it."""

    def __init__(
        self,
        config: KVConnectorConfig,
        make_agent: MakeAgent,
        *,
        lease_duration: float,
        handshake_timeout: float,
        read_timeout: float,
    ) -> None:
        """`make_agent` is given a name that no other agent has. Times are in seconds."""
        self.config = config
        self._make_agent = make_agent
        self._handshake_timeout, self._read_timeout = handshake_timeout, read_timeout
        self._leases = Leases(lease_duration)
        self._agent: TransferAgent | None = None
        self._stats = NixlKVConnectorStats()
        self._start_over()

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Opens the whole cache to reads. Raises `MinivllmError` if nixl is not installed."""
        tensors = [tensor for layer in kv_caches.values() for tensor in layer]
        self._agent = self._make_agent(str(uuid.uuid4()))
        self._agent.register(tensors)
        self._own = own_metadata(self.config, self._agent.metadata(), tensors)
        self._hash = compute_nixl_compatibility_hash(self.config)
        rank = self.config.tensor_parallel_rank
        self._peers = Peers(self._agent, self._own, rank, self._hash, self._handshake_timeout)

    def get_handshake_metadata(self) -> bytes:
        """What the side channel answers for this rank."""
        payload = NixlHandshakePayload(self._hash, msgspec.msgpack.encode(self._own))
        return msgspec.msgpack.encode(payload)

    def start_load_kv(self, metadata: PullConnectorMetadata) -> None:
        """Takes in what the scheduler has decided, and begins the reads that can begin."""
        self._leases.grant(metadata.reqs_to_send)
        self._releases |= metadata.reqs_to_release
        self._reads |= {request_id: _Read(order) for request_id, order in metadata.reqs_to_recv.items()}
        self._send_heartbeats(metadata.heartbeats)
        self._advance()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks need not be kept any more, and those whose reads have ended, well or not."""
        self._advance()
        assert self._agent is not None
        self._leases.take(self._agent.notifications())
        read, expired = self._leases.take_ended()
        if expired:
            self._stats.record_expired(len(expired))
            logger.warning("Nobody has read the blocks of %s in time: they are free", ", ".join(sorted(expired)))
        received, self._received = self._received, set()
        return read | expired, received

    def take_failed(self) -> set[str]:
        """Those just returned as received of which nothing can be used."""
        failed, self._failed = self._failed, set()
        return failed

    def take_invalid_block_ids(self) -> set[int]:
        """Their blocks."""
        blocks, self._invalid_block_ids = self._invalid_block_ids, set()
        return blocks

    def take_stats(self) -> dict[str, Any] | None:
        """See `NixlKVConnectorStats`."""
        return self._stats.take()

    def take_told(self) -> list[str] | None:
        """Whose prefill engine now knows that its blocks are not wanted; or cannot be told; None for nobody."""
        told, self._told = self._told, []
        return told or None

    def reset(self) -> None:
        """Gives up all reads and releases: nothing writes into the cache any more. Leases run on."""
        until = time.monotonic() + SECONDS_TO_CANCEL
        for read in self._reads.values():
            while read.transfer is not None and not read.transfer.release() and time.monotonic() < until:
                time.sleep(0.001)
        self._start_over()

    def shutdown(self) -> None:
        """Releases all that the agent has."""
        if self._agent is not None:
            self.reset()
            self._agent.close()
            self._agent = None

    def _start_over(self) -> None:
        self._reads: dict[str, _Read] = {}
        self._releases: dict[str, RemotePrefill] = {}
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._told: list[str] = []

    def _advance(self) -> None:
        """Moves every read and every release as far as it goes without waiting."""
        for request_id, read in list(self._reads.items()):
            try:
                if self._is_over(read):
                    self._end(request_id, read)
            except Exception as error:  # NIXL has exceptions of its own
                self._fail(request_id, read, error)
        for request_id, remote in list(self._releases.items()):
            try:
                peer = self._peers.meet(remote)
            except MinivllmError:
                self._tell(request_id, None, remote)
            else:
                if peer is not None:
                    self._tell(request_id, peer, remote)
        self._peers.forget_lost({read.peer.name for read in self._reads.values() if read.peer})

    def _is_over(self, read: _Read) -> bool:
        """Whether all bytes have come, and are the request's. Raises `MinivllmError` if they will not, or are not."""
        if read.transfer is None:
            read.peer = self._peers.meet(read.order.remote)
            if read.peer is None:
                return False
            read.transfer = self._begin(read.order, read.peer)
            read.deadline = time.monotonic() + self._read_timeout
        state, remote, peer = read.transfer.state(), read.order.remote, read.peer
        assert peer is not None
        if state == "ERR":
            self._peers.lose(remote.engine_id)
            raise MinivllmError("NIXL says that the transfer has failed")
        if state == "PROC":
            if time.monotonic() > read.deadline and read.transfer.release():
                read.transfer = None
                raise MinivllmError(f"it did not end within {self._read_timeout:g} s")
            return False
        if not peer.metadata.answers_is_held:
            return True
        if read.is_held is None:
            where = remote.host, remote.port, remote.request_id, self._handshake_timeout
            read.is_held = in_thread(lambda: ask_is_held(*where))
        if read.is_held.done() and not read.is_held.result():
            raise MinivllmError("the prefill engine does not keep its blocks any more: they were read, or not in time")
        return read.is_held.done()

    def _begin(self, order: ReadOrder, peer: Peer) -> Transfer:
        """Posts the READ. Raises `MinivllmError` if the other engine cannot have all these tokens."""
        mine, theirs, remote = self._own, peer.metadata, order.remote
        if order.end > len(remote.block_ids) * theirs.block_size or max(remote.block_ids) >= theirs.num_blocks:
            raise MinivllmError(
                f"remote_block_ids does not name the blocks of {order.end} tokens: there are {len(remote.block_ids)} "
                f"of {theirs.block_size}, in a cache of {theirs.num_blocks}"
            )
        tokens = range(order.start, order.end, peer.piece_tokens)
        num_regions = len(mine.block_lens)
        into = piece_indices(order.block_ids, mine.block_size, order.start, tokens, mine.num_blocks, num_regions)
        pieces = piece_indices(remote.block_ids, theirs.block_size, 0, tokens, theirs.num_blocks, num_regions)
        assert self._agent is not None
        try:
            return self._agent.read(peer.local_pieces, into, peer.remote_pieces, pieces, b"")
        except Exception:
            self._peers.lose(remote.engine_id)
            raise

    def _end(self, request_id: str, read: _Read) -> None:
        assert read.transfer is not None
        self._stats.record_transfer(read.transfer.times())
        read.transfer.release()
        self._notify(read.peer, consumed_message(read.order.remote.request_id, self.config.tensor_parallel_size))
        del self._reads[request_id]
        self._received.add(request_id)

    def _fail(self, request_id: str, read: _Read, error: Exception) -> None:
        remote = read.order.remote
        logger.warning(
            "The blocks of request %s were not read from %s:%d: %s", request_id, remote.host, remote.port, error
        )
        if read.transfer is not None:
            read.transfer.release()
        self._stats.record_failed_transfer()
        del self._reads[request_id]
        self._received.add(request_id)
        self._failed.add(request_id)
        self._invalid_block_ids.update(read.order.block_ids)

    def _tell(self, request_id: str, peer: Peer | None, remote: RemotePrefill) -> None:
        self._notify(peer, consumed_message(remote.request_id, self.config.tensor_parallel_size))
        del self._releases[request_id]
        self._told.append(request_id)

    def _notify(self, peer: Peer | None, message: bytes) -> None:
        """Sends it if it can; where it cannot, leases end by themselves."""
        assert self._agent is not None
        try:
            if peer is None:
                raise MinivllmError("there was no handshake")
            self._agent.notify(peer.name, message)
        except Exception as error:
            self._stats.record_failed_notification()
            logger.warning("A prefill engine could not be notified (%s); its lease will end", error)

    def _send_heartbeats(self, remotes: list[RemotePrefill]) -> None:
        """One notification to each engine that is known; the others are met meanwhile."""
        by_engine = groupby(sorted(remotes, key=lambda remote: remote.engine_id), lambda remote: remote.engine_id)
        for theirs in (list(group) for _, group in by_engine):
            peer = None
            with suppress(MinivllmError):
                peer = self._peers.greet(theirs[0])
            if peer is not None:
                self._notify(peer, heartbeat_message(remote.request_id for remote in theirs))


def own_metadata(config: KVConnectorConfig, agent_metadata: bytes, tensors: list[torch.Tensor]) -> NixlAgentMetadata:
    """What a peer must know of a cache whose regions are these tensors, [num_blocks, ...] each."""
    lengths = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    return NixlAgentMetadata(
        engine_id=config.kv_transfer_config.engine_id,
        agent_metadata=agent_metadata,
        kv_caches_base_addr=[tensor.data_ptr() for tensor in tensors],
        device_id=tensors[0].device.index or 0,
        num_blocks=len(tensors[0]),
        block_lens=lengths,
        block_strides=lengths,
        kv_cache_layout=LAYOUT_WITH_SCALES if tensors[0].dtype == torch.int8 else PLAIN_LAYOUT,
        block_size=config.block_size,
        registration_generation=uuid.uuid4().hex,
        answers_is_held=True,
    )
