"""The ranks' side of the TCP connector: answers other engines that read its blocks, and reads theirs, in threads.

The step only hands orders over and asks what has ended, so transfers and forward passes run side by side.
"""

import functools
import sys
from typing import Any

from minivllm.core.kv_connector import KVCaches, KVConnectorConfig
from minivllm.errors import MinivllmError
from minivllm.kv_connector.pull_params import RemotePrefill
from minivllm.kv_connector.pull_scheduler import ReadOrder
from minivllm.kv_connector.tcp.checksums import Payload, own_checksums, xxh64
from minivllm.kv_connector.tcp.kept import KeptBlocks
from minivllm.kv_connector.tcp.peer import Load, RemoteEngine
from minivllm.kv_connector.tcp.scheduler import TCPConnectorMetadata
from minivllm.kv_connector.tcp.settings import TCPSettings
from minivllm.kv_connector.tcp.staging import BlockStaging, StagingBuffer
from minivllm.kv_connector.tcp.transport import (
    Connection,
    Done,
    EngineLayout,
    Heartbeat,
    PieceSent,
    Read,
    Refused,
    RefusedError,
    Release,
    TransferError,
    TransferServer,
    connect,
)
from minivllm.logger import init_logger

logger = init_logger(__name__)
MOST_ENGINES = 64
"""More are talked to only while each has something to be read or told."""
IDLE_SECONDS = 600.0
"""How long a connection stays open without a word."""


class TCPConnectorWorker:
    """See `KVConnectorBase_V1` for the methods that have no words here. One thread at a time may call it."""

    def __init__(self, config: KVConnectorConfig, settings: TCPSettings) -> None:
        self.config, self.settings = config, settings
        self.kept = KeptBlocks(settings.lease_duration)
        self._server: TransferServer | None = None
        self._engines: dict[tuple[str, int], RemoteEngine] = {}
        self._forget_all()

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Opens the server, if this engine gives anything away. Raises `MinivllmError` if its address is taken."""
        self.staging = BlockStaging(kv_caches)
        self.layout = layout_of(self.config, self.staging)
        if own_checksums()[0] == "xxh64":
            xxh64(Payload.of(b"compiled now, not in the first transfer"))
        if self.config.kv_transfer_config.is_kv_producer:
            address = self.settings.address_of(self.config)
            self._server = TransferServer(
                address, self.settings.secret, self.layout, self._answer, self.settings.timeout
            )

    def get_handshake_metadata(self) -> dict[str, Any] | None:
        """Where this rank listens; None if it does not."""
        return None if self._server is None else {"host": self.settings.host, "port": self._server.port}

    def start_load_kv(self, metadata: TCPConnectorMetadata) -> None:
        """Takes in what the scheduler has decided: what is kept for others, and what is to be read from them."""
        self.kept.grant(metadata.blocks_to_send)
        for request_id, order in metadata.reqs_to_recv.items():
            self._begin(request_id, order, metadata.within_step)
        for request_id, remote in metadata.reqs_to_release.items():
            told = functools.partial(self._told.append, request_id)
            self._engine(remote).tell(Release([remote.request_id]), told)
        for remote in metadata.heartbeats:
            self._engine(remote).tell(Heartbeat([remote.request_id]))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for this layer of the loads that the step's tokens need."""
        count = self.staging.layer_names.index(layer_name) + 1
        for load in self._within_step:
            load.wait_for_layers(count)

    def wait_for_save(self) -> None:
        """Nothing is saved; but the loads of this step end with it, also where no layer asked for them."""
        for load in self._within_step:
            load.wait_for_layers(len(self.staging.layers))
            self._took(load)
        self._within_step.clear()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks need not be kept any more, and those whose loads have ended, well or not."""
        read, expired = self.kept.take_finished()
        if expired:
            logger.warning("Nobody has read the blocks of %s in time: they are free", ", ".join(sorted(expired)))
            self._count("tcp_num_kv_expired_reqs", len(expired))
        received = {load.request_id for load in self._loads.values() if load.is_over}
        for request_id in received:
            load = self._loads.pop(request_id)
            self._took(load)
            if load.error is not None:
                self._failed.add(request_id)
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
        """Counts since the last call: a list for a histogram, a number for a counter."""
        stats, self._stats = self._stats, {}
        return stats or None

    def take_told(self) -> list[str] | None:
        """Requests whose release has been told, or cannot be; None for nobody."""
        told = [self._told.pop() for _ in range(len(self._told))]
        return told or None

    def reset(self) -> None:
        """Gives up all loads: nothing writes into the cache any more. What is kept for others stays so."""
        for load in (*self._loads.values(), *self._within_step):
            load.cancel()
        self._forget_all()

    def shutdown(self) -> None:
        """Ends all threads and connections."""
        self.reset()
        if self._server is not None:
            self._server.close()
            self._server = None
        while self._engines:
            self._engines.popitem()[1].close()

    def _forget_all(self) -> None:
        self._loads: dict[str, Load] = {}
        self._within_step: list[Load] = []
        self._failed: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._told: list[str] = []
        self._stats: dict[str, Any] = {}

    def _engine(self, remote: RemotePrefill) -> RemoteEngine:
        """The rank of that engine that this one talks to: the one with the same number, at the port of that number."""
        address = remote.host, remote.port + self.config.tensor_parallel_rank
        if address not in self._engines:
            self._forget_an_engine()
            self._engines[address] = RemoteEngine(functools.partial(self._connect, *address), self.staging)
        return self._engines[address]

    def _forget_an_engine(self) -> None:
        """Whoever sends requests can name any number of addresses; each has two threads."""
        if len(self._engines) >= MOST_ENGINES:
            idle = next((address for address, engine in self._engines.items() if engine.is_idle), None)
            if idle is not None:
                self._engines.pop(idle).retire()

    def _connect(self, host: str, port: int) -> Connection:
        return connect(host, port, self.settings.secret, self.layout, self.settings.timeout)[0]

    def _begin(self, request_id: str, order: ReadOrder, within_step: bool) -> None:
        """Blocks have one size on both sides, so block i of the order is block `start` / size + i there."""
        skipped = order.start // self.config.block_size
        count = -(-order.end // self.config.block_size) - skipped
        remote = order.remote.block_ids[skipped : skipped + count]
        load = Load(request_id, order.remote.request_id, skipped, remote, order.block_ids[:count])
        if within_step:
            self._within_step.append(load)
        else:
            self._loads[request_id] = load
        if len(remote) < count:
            text = f"remote_block_ids names {len(order.remote.block_ids)} blocks; {order.end} tokens need more"
            load.end(text, 0.0)
            return
        self._engine(order.remote).read(load)

    def _took(self, load: Load) -> None:
        """Counts a load that has ended; one that failed leaves blocks that hold nothing."""
        if load.error is None:
            self._stats.setdefault("tcp_xfer_time_seconds", []).append(load.seconds)
            nbytes = len(load.local) * self.staging.block_bytes
            self._stats.setdefault("tcp_bytes_transferred", []).append(nbytes)
            return
        logger.warning("The blocks of request %s were not read: %s", load.request_id, load.error)
        self._count("tcp_num_failed_transfers", 1)
        self._invalid_block_ids.update(load.local)

    def _count(self, name: str, number: int) -> None:
        self._stats[name] = self._stats.get(name, 0) + number

    def _answer(self, connection: Connection) -> None:
        """In a thread of its own: serves another engine until it leaves."""
        buffer = None
        while True:
            connection.wait_for_frame(IDLE_SECONDS)
            message = connection.receive()
            if isinstance(message, Read):
                buffer = buffer or StagingBuffer(self.staging)
                self._send_blocks(connection, message, buffer)
                continue
            if isinstance(message, Heartbeat):
                self.kept.heartbeat(message.request_ids)
            elif isinstance(message, Release):
                self.kept.end(message.request_ids)
            else:
                raise TransferError(f"{type(message).__name__} is no request")
            connection.send(Done())

    def _send_blocks(self, connection: Connection, message: Read, buffer: StagingBuffer) -> None:
        try:
            self.kept.wait_until_kept(message.request_id, message.first, message.block_ids)
            ids = self.staging.ids(message.block_ids)
            for piece in self.staging.pieces(len(message.block_ids)):
                payload, sent = buffer.gather(piece, ids), PieceSent(piece.layer, piece.first, piece.count)
                connection.send(sent, payload, functools.partial(self.kept.check, message.request_id))
        except (RefusedError, MinivllmError) as refusal:
            connection.send(Refused(str(refusal)))


def layout_of(config: KVConnectorConfig, staging: BlockStaging) -> EngineLayout:
    """What another engine must have alike."""
    return EngineLayout(
        engine_id=config.kv_transfer_config.engine_id,
        model=config.model_fingerprint,
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        tensor_parallel_rank=config.tensor_parallel_rank,
        kv_cache_dtype=config.kv_cache_dtype,
        cache=staging.cache,
        byte_order=sys.byteorder,
    )
