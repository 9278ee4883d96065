"""The prefill engines that this rank reads from. Each is met once, in a thread, so that no step
waits for the network.

In vLLM v0.33.0: `_background_nixl_handshake` and `add_remote_agent` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py`.
"""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.agent import NixlAgent, Region
from minivllm.kv_connector.nixl.side_channel import NixlAgentMetadata
from minivllm.kv_connector.pull_params import GENERATIONS_JOINED_BY, RemotePrefill

Fetch = Callable[[str, int], Future[NixlAgentMetadata]]
"""Begins to ask the engine at this host and port for the metadata of its rank of the same number."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank of another engine: its name in the agent, its cache, and the list of its blocks that
    the agent has prepared.
    """

    name: str
    metadata: NixlAgentMetadata
    blocks: Any


class Peers:
    """All peers, by engine id, and the prepared list of this rank's own blocks. Only handshakes run
    in other threads.
    """

    def __init__(self, agent: NixlAgent, own: NixlAgentMetadata, rank: int, fetch: Fetch) -> None:
        """Take this rank, whose peers have the same rank, and what begins a handshake."""
        self.own_blocks = agent.prepare(None, _regions(own))
        self._agent = agent
        self._rank = rank
        self._fetch = fetch
        self._met: dict[str, Peer] = {}
        self._lost: list[Peer] = []
        self._meeting: dict[tuple[str, str, int], Future[NixlAgentMetadata]] = {}

    def meet(self, remote: RemotePrefill) -> Peer | None:
        """Return the peer for this remote request; None while the handshake is in progress.

        Raises:
            MinivllmError: the handshake has failed. The next call begins another.
        """
        peer = self._met.get(remote.engine_id)
        if peer is not None and self._is_current(remote, peer.metadata):
            return peer
        place = remote.engine_id, remote.host, remote.port
        if place not in self._meeting:
            self._meeting[place] = self._fetch(remote.host, remote.port)
        if not self._meeting[place].done():
            return None
        metadata = self._meeting.pop(place).result()
        self._check(remote, metadata)
        # An engine that has restarted has the same id and other memory.
        self.lose(remote.engine_id)
        try:
            name = self._agent.add_peer(metadata.agent_metadata)
            peer = Peer(name, metadata, self._agent.prepare(name, _regions(metadata)))
        except Exception as error:
            raise MinivllmError(f"NIXL cannot reach the engine {metadata.engine_id!r}: {error}") from None
        self._met[remote.engine_id] = peer
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
        generations = dict(enumerate((remote.registration_generation or "").split(GENERATIONS_JOINED_BY)))
        return generations.get(self._rank, "") in ("", metadata.registration_generation)

    def _check(self, remote: RemotePrefill, metadata: NixlAgentMetadata) -> None:
        where = f"the engine at {remote.host}:{remote.port}"
        if metadata.engine_id != remote.engine_id:
            raise MinivllmError(
                f"{where} is {metadata.engine_id!r}, and the request was computed by {remote.engine_id!r}"
            )
        if not self._is_current(remote, metadata):
            raise MinivllmError(f"{where} has restarted, and the blocks of {remote.request_id!r} are gone")


def _regions(cache: NixlAgentMetadata) -> list[Region]:
    """Describe a cache to NIXL, one piece for each block of each tensor."""
    return [
        Region(address, length, cache.device_id, length, cache.num_blocks)
        for address, length in zip(cache.kv_caches_base_addr, cache.block_lens, strict=True)
    ]
