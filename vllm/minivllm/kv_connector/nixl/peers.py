"""The prefill engines that this rank reads from. Each is met once, in a thread, so that no step
waits for the network.

In vLLM v0.33.0: `_background_nixl_handshake` and `add_remote_agent` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py`.
"""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.agent import NixlAgent
from minivllm.kv_connector.nixl.pieces import regions_in_pieces, tokens_of_a_piece
from minivllm.kv_connector.nixl.side_channel import NixlAgentMetadata, fetch_metadata
from minivllm.kv_connector.pull_params import GENERATIONS_JOINED_BY, RemotePrefill

Result = TypeVar("Result")
PLAIN_LAYOUT, LAYOUT_WITH_SCALES = "NHD", "NHD, scales HN"
"""How the dimensions within a block lie: N tokens, H heads, D elements of a head."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of another engine: its name in the agent, its cache, and the pieces that both sides
    can address.

    `clock_offset`: how many seconds its clock is ahead of ours.
    """

    name: str
    metadata: NixlAgentMetadata
    clock_offset: float
    piece_tokens: int
    local_pieces: Any
    remote_pieces: Any


class Peers:
    """All peers, by engine id. Only handshakes run in other threads."""

    def __init__(self, agent: NixlAgent, own: NixlAgentMetadata, rank: int, compatibility_hash: str, seconds: float):
        """Take this rank, whose peers have the same rank, and the timeout of a handshake in
        seconds.
        """
        self._agent = agent
        self._own = own
        self._ranks = (0, rank)
        self._hash = compatibility_hash
        self._seconds = seconds
        self._met: dict[str, Peer] = {}
        self._lost: list[Peer] = []
        self._meeting: dict[tuple[str, str, int], Future[tuple[NixlAgentMetadata, float]]] = {}
        self._local_pieces: dict[int, Any] = {}

    def known(self, remote: RemotePrefill) -> Peer | None:
        """Return the peer of this remote request if there was a handshake and it has not restarted
        since.
        """
        peer = self._met.get(remote.engine_id)
        return peer if peer and self._is_current(remote, peer.metadata) else None

    def greet(self, remote: RemotePrefill) -> Peer | None:
        """Return the peer that a heartbeat goes to, or start a handshake; a failed handshake is
        retried, and not reported.
        """
        handshake = self._meeting.get(_place_of(remote))
        if handshake is not None and handshake.done() and handshake.exception() is None:
            return self.meet(remote)
        peer = self.known(remote)
        if peer is None and (handshake is None or handshake.done()):
            self._meeting[_place_of(remote)] = in_thread(lambda: self._fetch(remote))
        return peer

    def meet(self, remote: RemotePrefill) -> Peer | None:
        """Return the peer for this remote request; None while the handshake is in progress.

        Raises:
            MinivllmError: the handshake has failed. The next call begins another.
        """
        if (peer := self.known(remote)) is not None:
            return peer
        place = _place_of(remote)
        if place not in self._meeting:
            self._meeting[place] = in_thread(lambda: self._fetch(remote))
        if not self._meeting[place].done():
            return None
        metadata, offset = self._meeting.pop(place).result()
        self._check(remote, metadata)
        # An engine that has restarted has the same id and other memory.
        self.lose(remote.engine_id)
        self._met[remote.engine_id] = peer = self._make(metadata, offset)
        return peer

    def lose(self, engine_id: str) -> None:
        """Forget an engine, so that its next request meets it again."""
        if (peer := self._met.pop(engine_id, None)) is not None:
            self._lost.append(peer)

    def forget_lost(self, in_use: Collection[str]) -> None:
        """Release everything prepared for lost engines, except for those whose names are `in_use`
        by a transfer.
        """
        # NIXL must not forget a peer while one of its transfers is under way.
        for peer in [peer for peer in self._lost if peer.name not in in_use]:
            self._lost.remove(peer)
            self._agent.remove_peer(peer.name)

    def _is_current(self, remote: RemotePrefill, metadata: NixlAgentMetadata) -> bool:
        """Return whether the blocks are in the memory that is registered there now, as far as the
        params tell.
        """
        generations = remote.generation.split(GENERATIONS_JOINED_BY)
        own = generations[self._ranks[1]] if self._ranks[1] < len(generations) else ""
        return own in ("", metadata.registration_generation)

    def _fetch(self, remote: RemotePrefill) -> tuple[NixlAgentMetadata, float]:
        return fetch_metadata(remote.host, remote.port, self._ranks, self._hash, self._seconds)

    def _check(self, remote: RemotePrefill, metadata: NixlAgentMetadata) -> None:
        where = f"the engine at {remote.host}:{remote.port}"
        if metadata.engine_id != remote.engine_id:
            raise MinivllmError(
                f"{where} is {metadata.engine_id!r}, and the request was computed by {remote.engine_id!r}"
            )
        if not self._is_current(remote, metadata):
            raise MinivllmError(f"{where} has restarted, and the blocks of {remote.request_id!r} are gone")
        if metadata.kv_cache_layout != self._own.kv_cache_layout:
            raise MinivllmError(f"{where} has layout {metadata.kv_cache_layout}, this one {self._own.kv_cache_layout}")
        if metadata.block_strides != metadata.block_lens:
            raise MinivllmError(f"{where} has gaps between its blocks, which this engine cannot read")
        if metadata.block_size != self._own.block_size and metadata.kv_cache_layout != PLAIN_LAYOUT:
            raise MinivllmError(
                f"{where} has blocks of {metadata.block_size} tokens, this one of {self._own.block_size}, and the "
                "scales of an int8 cache cannot be cut: give both the same block_size"
            )
        peer_bytes, own_bytes = (
            [length / cache.block_size for length in cache.block_lens] for cache in (metadata, self._own)
        )
        if peer_bytes != own_bytes:
            raise MinivllmError(
                f"{where} has {peer_bytes} bytes per token in its cache's regions, this one {own_bytes}"
            )

    def _make(self, metadata: NixlAgentMetadata, offset: float) -> Peer:
        tokens = tokens_of_a_piece(self._own.block_size, metadata.block_size)
        # Peers with the same block size share the list of local pieces.
        if tokens not in self._local_pieces:
            self._local_pieces[tokens] = self._prepare(None, self._own, tokens)
        try:
            name = self._agent.add_peer(metadata.agent_metadata)
            pieces = self._prepare(name, metadata, tokens)
        except Exception as error:
            raise MinivllmError(f"NIXL cannot reach the engine {metadata.engine_id!r}: {error}") from None
        return Peer(name, metadata, offset, tokens, self._local_pieces[tokens], pieces)

    def _prepare(self, name: str | None, cache: NixlAgentMetadata, tokens: int) -> Any:
        per_block = cache.block_size // tokens
        where = cache.kv_caches_base_addr, cache.block_lens, cache.device_id, cache.num_blocks, per_block
        return self._agent.prepare(name, regions_in_pieces(*where))


def _place_of(remote: RemotePrefill) -> tuple[str, str, int]:
    return remote.engine_id, remote.host, remote.port


def in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Run the work in a daemon thread, which does not keep the process from ending."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a peer that never answers must not keep the process from ending.
    threading.Thread(target=run, daemon=True, name="nixl-handshake").start()
    return future
