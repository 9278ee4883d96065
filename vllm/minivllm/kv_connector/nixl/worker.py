"""The workers' side of NIXL's connector: it reads blocks from other engines, and keeps its own
while they are leased.

A read takes five steps, none of which blocks: the handshake with the other engine, on first
contact; the READ; the question whether the blocks still belonged to the request when the last byte
had arrived; the notification that lets the other engine free them; the report to the scheduler. In
each step of the engine, every read is moved on as far as possible.

In vLLM v0.33.0: `NixlPullConnectorWorker` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_worker.py`, `base_worker.py`.
"""

import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import msgspec
import numpy as np
import torch

from minivllm.core.kv_connector import KVCaches, KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.agent import NixlAgent, Transfer
from minivllm.kv_connector.nixl.peers import Peer, Peers
from minivllm.kv_connector.nixl.settings import check_settings
from minivllm.kv_connector.nixl.side_channel import (
    NixlAgentMetadata,
    NixlHandshakePayload,
    ask_is_held,
    compute_nixl_compatibility_hash,
    fetch_metadata,
)
from minivllm.kv_connector.pull_leases import Leases
from minivllm.kv_connector.pull_params import RemotePrefill
from minivllm.kv_connector.pull_scheduler import ReadOrder
from minivllm.kv_connector.pull_worker import PullConnectorWorker, layout_of
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_CANCEL = 5.0
ASKERS = 32
"""Threads at most, for questions to other engines' side channels."""
HEARTBEAT = b"HB:"


@dataclass(slots=True)
class _Read:
    """A read and its progress. `deadline` is in seconds of `time.monotonic()`."""

    order: ReadOrder
    peer: Peer | None = None
    transfer: Transfer | None = None
    deadline: float = 0.0
    is_held: "Future[bool] | None" = None


class NixlConnectorWorker(PullConnectorWorker):
    """The worker's side of NIXL's connector. It is not thread-safe: only one thread may call it at
    a time.
    """

    kind = "nixl"

    def __init__(
        self,
        config: KVConnectorConfig,
        role: KVConnectorRole = KVConnectorRole.WORKER,
        make_agent: Callable[[str], NixlAgent] = NixlAgent,
    ) -> None:
        """Prepare the worker; `make_agent` is called with a unique name."""
        seconds = check_settings(config)
        super().__init__(config, role, seconds["kv_lease_duration"])
        self._handshake_timeout = seconds["handshake_timeout"]
        self._read_timeout = seconds["read_timeout"]
        self._make_agent = make_agent
        self._agent: NixlAgent | None = None
        self._asking = ThreadPoolExecutor(ASKERS, "nixl-ask")
        self._reads: dict[str, _Read] = {}
        self._releases: dict[str, RemotePrefill] = {}

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Register the whole cache for reads. Raise `MinivllmError` if nixl is not installed."""
        tensors = [tensor for layer in kv_caches.values() for tensor in layer]
        self._agent = self._make_agent(str(uuid.uuid4()))
        self._agent.register(tensors)
        self._own = own_metadata(self.config, self._agent.metadata(), tensors)
        self._hash = compute_nixl_compatibility_hash(layout_of(self.config, kv_caches))
        self._peers = Peers(self._agent, self._own, self.config.tensor_parallel_rank, self._fetch)

    def _fetch(self, host: str, port: int) -> Future[NixlAgentMetadata]:
        ask = host, port, self.config.tensor_parallel_rank, self._hash, self._handshake_timeout
        return self._asking.submit(fetch_metadata, *ask)

    def get_handshake_metadata(self) -> tuple[str, bytes]:
        """Return the generation of this rank's registered memory, and the side channel's answer for
        this rank.
        """
        payload = NixlHandshakePayload(self._hash, msgspec.msgpack.encode(self._own))
        return self._own.registration_generation, msgspec.msgpack.encode(payload)

    def start_load_kv(self) -> None:
        self.leases.grant(self.orders.reqs_to_send)
        self._releases |= self.orders.reqs_to_release
        self._reads |= {request_id: _Read(order) for request_id, order in self.orders.reqs_to_recv.items()}
        self._advance()
        # Behind the reads, so that a failed handshake fails a read before it is tried again here.
        self._send_heartbeats(self.orders.heartbeats)

    def look(self) -> None:
        self._advance()
        assert self._agent is not None
        take_notifications(self.leases, self._agent.notifications())

    def reset(self) -> None:
        """Cancel all reads and releases, so that nothing writes into the cache any more. Leases
        keep running.
        """
        until = time.monotonic() + SECONDS_TO_CANCEL
        for read in self._reads.values():
            # A transfer that cannot be cancelled still writes into the cache: wait for its end.
            while read.transfer is not None and not read.transfer.release() and time.monotonic() < until:
                time.sleep(0.001)
        self._reads.clear()
        self._releases.clear()
        self.forget_results()

    def shutdown(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)
        if self._agent is not None:
            self.reset()
            self._agent.close()
            self._agent = None

    def _advance(self) -> None:
        """Move every read and every release as far as possible without waiting."""
        for request_id, read in list(self._reads.items()):
            try:
                if self._is_over(read):
                    self._end(request_id, read)
            except Exception as error:  # NIXL has exceptions of its own
                if read.transfer is not None:
                    read.transfer.release()
                del self._reads[request_id]
                self.lose(request_id, f"{error} ({read.order.remote.host}:{read.order.remote.port})")
        for request_id, remote in list(self._releases.items()):
            try:
                if (peer := self._peers.meet(remote)) is None:
                    continue
            except MinivllmError:
                peer = None  # it cannot be told
            self._notify(peer, consumed_message(remote.request_id, self.config.tensor_parallel_size))
            del self._releases[request_id]
            self.tell(request_id)
        self._peers.forget_lost({read.peer.name for read in self._reads.values() if read.peer})

    def _is_over(self, read: _Read) -> bool:
        """Return whether all bytes have arrived. Raise `MinivllmError` if they will not, or belong
        to another request.
        """
        if read.transfer is None:
            read.peer = self._peers.meet(read.order.remote)
            if read.peer is None:
                return False
            read.transfer = self._begin(read.order, read.peer)
            read.deadline = time.monotonic() + self._read_timeout
        state = read.transfer.state()
        remote = read.order.remote
        if state == "ERR":
            self._peers.lose(remote.engine_id)
            raise MinivllmError("NIXL reports that the transfer has failed")
        if state == "PROC":
            # Not lost while it cannot be cancelled: its blocks are still being written.
            if time.monotonic() > read.deadline and read.transfer.release():
                read.transfer = None
                raise MinivllmError(f"it did not end within {self._read_timeout:g} s")
            return False
        if read.is_held is None:
            where = remote.host, remote.port, remote.request_id, self._handshake_timeout
            read.is_held = self._asking.submit(ask_is_held, *where)
        if read.is_held.done() and not read.is_held.result():
            raise MinivllmError("the prefill engine no longer keeps the blocks: they were read, or not in time")
        return read.is_held.done()

    def _begin(self, order: ReadOrder, peer: Peer) -> Transfer:
        """Post the READ. Raise `MinivllmError` if the other engine cannot hold all these tokens."""
        remote = order.remote
        (block_ids,) = remote.block_ids
        size = self.config.block_size
        first, last = order.start // size, -(-order.end // size)
        if last > len(block_ids) or max(block_ids) >= peer.metadata.num_blocks:
            raise MinivllmError(
                f"remote_block_ids does not name the blocks of {order.end} tokens: there are {len(block_ids)} "
                f"of {size}, in a cache of {peer.metadata.num_blocks}"
            )
        # A cache's list has the blocks of one tensor behind those of another.
        tensors = np.arange(len(self._own.block_lens))[:, None]
        into = (tensors * self._own.num_blocks + order.block_ids[: last - first]).ravel()
        blocks = (tensors * peer.metadata.num_blocks + block_ids[first:last]).ravel()
        assert self._agent is not None
        try:
            return self._agent.read(self._peers.own_blocks, into, peer.blocks, blocks)
        except Exception:
            self._peers.lose(remote.engine_id)
            raise

    def _end(self, request_id: str, read: _Read) -> None:
        assert read.transfer is not None
        self.observe(**read.transfer.times())
        read.transfer.release()
        # Not with the READ itself: the blocks are released only after `is_held` was answered.
        self._notify(read.peer, consumed_message(read.order.remote.request_id, self.config.tensor_parallel_size))
        del self._reads[request_id]
        self.receive(request_id)

    def _notify(self, peer: Peer | None, message: bytes) -> None:
        """Send a notification if possible; if not, the lease will expire by itself."""
        assert self._agent is not None
        try:
            if peer is None:
                raise MinivllmError("there was no handshake")
            self._agent.notify(peer.name, message)
        except Exception as error:
            self.count("num_failed_notifications")
            logger.warning("A prefill engine could not be notified (%s); its lease will end", error)

    def _send_heartbeats(self, remotes: list[RemotePrefill]) -> None:
        """Send one notification to each engine that is known, and start handshakes with the others."""
        by_engine = groupby(sorted(remotes, key=lambda remote: remote.engine_id), lambda remote: remote.engine_id)
        for requests in (list(group) for _, group in by_engine):
            peer = None
            with suppress(MinivllmError):
                peer = self._peers.meet(requests[0])
            if peer is not None:
                self._notify(peer, heartbeat_message(remote.request_id for remote in requests))


def heartbeat_message(request_ids: Iterable[str]) -> bytes:
    """Return the notification that renews the leases of these requests."""
    return HEARTBEAT + ",".join(sorted(request_ids)).encode()


def consumed_message(request_id: str, tensor_parallel_size: int) -> bytes:
    """Return the notification that a rank has read everything it wanted of a request."""
    return f"{request_id}:{tensor_parallel_size}".encode()


def take_notifications(leases: Leases, messages: Iterable[bytes]) -> None:
    """Handle notifications. Those that are malformed, or name no request here, have no effect."""
    for message in messages:
        if message.startswith(HEARTBEAT):
            leases.renew(message.removeprefix(HEARTBEAT).decode(errors="replace").split(","))
        else:
            leases.end([message.decode(errors="replace").rpartition(":")[0]])


def own_metadata(config: KVConnectorConfig, agent_metadata: bytes, tensors: list[torch.Tensor]) -> NixlAgentMetadata:
    """Return the metadata that peers need about a cache whose regions are these tensors,
    [num_blocks, ...] each.
    """
    lengths = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    return NixlAgentMetadata(
        engine_id=config.kv_transfer_config.engine_id,
        agent_metadata=agent_metadata,
        kv_caches_base_addr=[tensor.data_ptr() for tensor in tensors],
        device_id=tensors[0].device.index or 0,
        num_blocks=len(tensors[0]),
        block_lens=lengths,
        registration_generation=uuid.uuid4().hex,
    )
