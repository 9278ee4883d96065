"""The workers' side of the TCP connector: it answers other engines that read its blocks, and reads
theirs, in threads.

The step only hands over orders and collects what has finished, so transfers and forward passes run
concurrently. A transfer is cut into pieces of several blocks with all of their layers, in the same
way on both sides; each piece is gathered into a buffer, sent, received and scattered. A block that
is released while it is being gathered may already belong to another request, so the server checks
the lease once more before it sends a piece.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Literal

import msgspec

from minivllm.core.kv_connector import KVCaches, KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError
from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.host_copies import HostCopies, host_buffer
from minivllm.kv_connector.pull_params import RemotePrefill
from minivllm.kv_connector.pull_scheduler import ReadOrder
from minivllm.kv_connector.pull_worker import PullConnectorWorker, layout_of
from minivllm.kv_connector.tcp import protocol
from minivllm.kv_connector.tcp.protocol import Ask, Connection, RefusedError, TransferError
from minivllm.kv_connector.tcp.settings import TCPSettings
from minivllm.logger import init_logger

logger = init_logger(__name__)
PIECE_BYTES = 1 << 20
READERS, TELLERS, ANSWERERS = 8, 32, 32
"""Threads at most: for loads, for words (which no load must hold up), and for what others ask."""
SECONDS_TO_WAIT = 2.0
"""How long a read waits for the lease: the client hears of a request's end before the ranks do,
in the next step.
"""


class Buffer:
    """A buffer in host memory for one piece of a transfer, and the copies between it and the cache."""

    def __init__(self, regions: BlockRegions) -> None:
        self._record_bytes = regions.record_bytes
        self._num_blocks = max(1, PIECE_BYTES // self._record_bytes)
        self.host = host_buffer(self._num_blocks, self._record_bytes, pinned=regions.device.type == "cuda")
        self.copies = HostCopies(regions, self.host.numel())

    def pieces(self, block_ids: Sequence[int]) -> Iterator[tuple[Sequence[int], range, memoryview]]:
        """Cut a transfer into pieces; yield each piece's blocks, and its records and its bytes in
        the buffer.
        """
        for first in range(0, len(block_ids), self._num_blocks):
            piece = block_ids[first : first + self._num_blocks]
            yield piece, range(len(piece)), self.host.numpy().data[: len(piece) * self._record_bytes]


class TCPConnectorWorker(PullConnectorWorker):
    """The worker's side of the TCP connector. It is not thread-safe: only one thread may call it at
    a time.
    """

    kind = "tcp"

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.WORKER) -> None:
        """Check the settings; raise `MinivllmError` for settings that are unknown or not supported."""
        self.settings = TCPSettings.of(config)
        super().__init__(config, role, self.settings.lease_duration)
        # Pools of their own: slow loads must not delay heartbeats, or leases would end.
        self._readers, self._tellers, self._answerers = map(ThreadPoolExecutor, (READERS, TELLERS, ANSWERERS))
        self._loads: dict[str, tuple[ReadOrder, Future[dict[str, float]]]] = {}
        # Orders whose blocks may still be written; a reset empties it, and threads look before each
        # write.
        self._wanted: set[ReadOrder] = set()
        self._writing = Lock()
        self._open: set[Connection] = set()
        self._listener: socket.socket | None = None
        self._is_closed = False

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Start the server if this engine is a producer. Raise `MinivllmError` if its address is
        taken.
        """
        self.regions = BlockRegions.of([tensor for tensors in kv_caches.values() for tensor in tensors])
        # Sent with each read, and compared by the other side before it sends anything.
        self.layout = layout_of(self.config, kv_caches)
        if not self.config.kv_transfer_config.is_kv_producer:
            return
        host, port = self.settings.address_of(self.config)
        try:
            self._listener = socket.create_server((host, port), backlog=64)
        except (OSError, UnicodeError) as error:
            raise MinivllmError(
                f"cannot listen on {host}:{port}: {error}; set kv_connector_extra_config.host and port to an address "
                "of this machine and a free port"
            ) from error
        self._accepting = Thread(target=self._accept, args=(self._listener,), name="kv-transfer-accept", daemon=True)
        self._accepting.start()

    def get_handshake_metadata(self) -> int | None:
        """Return the port on which this rank listens; None if it does not listen."""
        return self._listener and self._listener.getsockname()[1]

    def start_load_kv(self) -> None:
        self.leases.grant(self.orders.reqs_to_send)
        for request_id, order in self.orders.reqs_to_recv.items():
            self._wanted.add(order)
            self._loads[request_id] = order, self._readers.submit(self._load, order)
        for request_id, remote in self.orders.reqs_to_release.items():
            future = self._tellers.submit(self._say, "release", remote)
            future.add_done_callback(lambda _, request_id=request_id: self.tell(request_id))
        for remote in self.orders.heartbeats:
            self._tellers.submit(self._say, "renew", remote)

    def look(self) -> None:
        for request_id in [name for name, (_, future) in self._loads.items() if future.done()]:
            order, future = self._loads.pop(request_id)
            self._wanted.discard(order)
            if (error := future.exception()) is not None:
                self.lose(request_id, error)
                continue
            self.receive(request_id)
            self.observe(**future.result())

    def reset(self) -> None:
        """Abandon all loads, so that nothing writes into the cache any more. Blocks kept for others
        stay kept.
        """
        with self._writing:
            self._wanted.clear()
        self._loads.clear()
        self.forget_results()

    def shutdown(self) -> None:
        self.reset()
        self._is_closed = True
        if self._listener is not None:
            with suppress(OSError):  # some systems cannot shut a listener down, and wake when it is closed
                # This wakes the thread that waits in `accept`; closing alone would not.
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._accepting.join()
        # Threads that wait for the network get an error and end.
        for connection in list(self._open):
            connection.close()
        for pool in (self._readers, self._tellers, self._answerers):
            pool.shutdown(cancel_futures=True)

    @contextmanager
    def _using(self, connection: Connection) -> Iterator[Connection]:
        """Close a connection at the end of the block, or when this connector shuts down."""
        self._open.add(connection)
        try:
            # It may have been shut down after the thread was started.
            if self._is_closed:
                raise TransferError("the connector was shut down")
            yield connection
        finally:
            self._open.discard(connection)
            connection.close()

    # In the threads that ask other engines

    @contextmanager
    def _asking(self, remote: RemotePrefill, ask: Ask) -> Iterator[Connection]:
        """Send a question to the other engine's rank of the same number, whose port is
        `remote_port` plus that number.
        """
        port = remote.port + self.config.tensor_parallel_rank
        with self._using(protocol.connect(remote.host, port, self.settings.timeout)) as connection:
            protocol.authenticate(connection, self.settings.secret, "client")
            connection.send(msgspec.msgpack.encode(ask))
            yield connection

    def _load(self, order: ReadOrder) -> dict[str, float]:
        """Fill an order's blocks, retrying once on a new connection if the first one breaks. Return
        what to record.
        """
        start = time.monotonic()
        try:
            try:
                num_blocks = self._read(order)
            except RefusedError:  # the other engine would answer the same again
                raise
            except TransferError:
                num_blocks = self._read(order)
        finally:  # read or lost, the other engine need not keep them
            if not self._is_closed:
                self._tellers.submit(self._say, "release", order.remote)
        num_bytes = num_blocks * self.regions.record_bytes
        return {"xfer_time_seconds": time.monotonic() - start, "bytes_transferred": num_bytes}

    def _read(self, order: ReadOrder) -> int:
        """Fill an order's blocks, and return their number. Blocks have the same size on both sides."""
        remote = order.remote
        size = self.config.block_size
        # The prefix cache may have had the first blocks.
        first = order.start // size
        count = -(-order.end // size) - first
        ask = Ask("read", remote.request_id, first, list(remote.block_ids[0][first : first + count]), self.layout)
        buffer = Buffer(self.regions)
        with self._asking(remote, ask) as connection:
            for piece, records, room in buffer.pieces(order.block_ids[:count]):
                connection.receive(len(room), room)
                with self._writing:
                    if order not in self._wanted:
                        raise RefusedError("it was abandoned")
                    buffer.copies.from_host(piece, buffer.host, records)
        return count

    def _say(self, what: Literal["renew", "release"], remote: RemotePrefill) -> None:
        """Send a message that leases depend on; if it cannot be sent, they expire by themselves."""
        try:
            with self._asking(remote, Ask(what, remote.request_id)) as connection:
                connection.receive(0)
        except TransferError as error:
            logger.warning("A message could not be sent to another engine (%s); its leases will end", error)

    # In the threads that answer them

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connection = Connection(listener.accept()[0], self.settings.timeout)
            except OSError:  # it was closed, or no file descriptor is free
                # Without a free file descriptor `accept` fails at once, again and again.
                time.sleep(0 if self._is_closed else 0.05)
            else:
                self._answerers.submit(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        with suppress(TransferError), self._using(connection):  # the other side says what went wrong
            try:
                self._answer(connection)
            except (RefusedError, msgspec.MsgspecError) as refusal:
                connection.send(str(refusal).encode(), refused=True)

    def _answer(self, connection: Connection) -> None:
        protocol.authenticate(connection, self.settings.secret, "server")
        ask = msgspec.msgpack.decode(connection.receive(protocol.MOST_ASKED), type=Ask)
        if ask.what == "read":
            self._send_blocks(connection, ask)
            return
        (self.leases.renew if ask.what == "renew" else self.leases.end)([ask.request_id])
        connection.send(b"")

    def _send_blocks(self, connection: Connection, ask: Ask) -> None:
        # Name the first difference: the operator of either engine can act on it.
        for name, own in self.layout.items():
            if (theirs := ask.layout.get(name)) != own:
                raise RefusedError(f"the engines are incompatible: {name} is {own} here and {theirs} there")
        kept = self._kept(ask.request_id, SECONDS_TO_WAIT)
        if ask.first < 0 or list(kept[ask.first :][: len(ask.block_ids)]) != ask.block_ids:
            raise RefusedError(f"request {ask.request_id!r} does not have the requested blocks")
        buffer = Buffer(self.regions)
        for piece, records, room in buffer.pieces(ask.block_ids):
            buffer.copies.to_host(piece, buffer.host, records)
            # Look again after the copy: a lease that has ended meanwhile may mean that other tokens
            # lie there.
            self._kept(ask.request_id)
            connection.send(room)

    def _kept(self, request_id: str, seconds: float = 0.0) -> tuple[int, ...]:
        """Renew a lease and return its blocks. Raise `RefusedError` if it has ended: they may
        belong to another request by now.
        """
        kept = self.leases.blocks_of(request_id, seconds)
        if kept is None:
            raise RefusedError(f"the blocks of request {request_id!r} are not kept: they were read, or not in time")
        self.leases.renew([request_id])
        return kept
