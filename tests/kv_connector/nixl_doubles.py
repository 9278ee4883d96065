"""Agents that move bytes within this process, and engines over them that consist only of a
connector's two sides.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from kv_connector.pull_doubles import PullEngine
from patience import PATIENCE
from server.serving import free_port

from minivllm.config.kv_transfer import KVTransferConfig
from minivllm.core.kv_connector import KVConnectorConfig
from minivllm.kv_connector.nixl.agent import Region, State
from minivllm.kv_connector.nixl.scheduler import NixlConnectorScheduler
from minivllm.kv_connector.nixl.worker import NixlConnectorWorker

CONFIG = KVConnectorConfig(
    kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", engine_id="an engine"),
    model_fingerprint="a model", block_size=4, num_gpu_blocks=16, kv_cache_dtype="float32",
)  # fmt: skip


def config_of(engine_id: str = "an engine", role: str = "kv_both", extra: dict | None = None, **others):
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", engine_id=engine_id, kv_role=role, kv_connector_extra_config=extra or {}
    )
    return replace(CONFIG, kv_transfer_config=transfer, **others)


@dataclass
class Network:
    """The agents that exist, and how their transfers go."""

    agents: dict[str, "AgentDouble"] = field(default_factory=dict)
    polls_of_a_read: int = 0
    state_after: State = "DONE"
    cancels: bool = True

    def agent(self, name: str) -> "AgentDouble":
        self.agents[name] = AgentDouble(name, self)
        return self.agents[name]


class AgentDouble:
    """An agent without NIXL; `released` counts what was prepared and has been released."""

    def __init__(self, name: str, network: Network) -> None:
        self.name, self.network = name, network
        self.inbox: list[bytes] = []
        self.prepared: list[str | None] = []
        self.reads: list[ReadDouble] = []

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)  # which keeps them alive

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, metadata: bytes) -> str:
        if metadata.decode() not in self.network.agents:
            raise KeyError(metadata)
        return metadata.decode()

    def remove_peer(self, peer: str) -> None:
        self.prepared = [of for of in self.prepared if of != peer]

    def prepare(self, peer: str | None, regions: Sequence[Region]):
        self.prepared.append(peer)
        return peer, [
            (region.address + place * region.stride, region.num_bytes)
            for region in regions
            for place in range(region.count)
        ]

    def read(self, local, into: np.ndarray, remote, pieces: np.ndarray) -> "ReadDouble":
        peer, theirs = remote
        if peer not in self.network.agents:
            raise ConnectionError(f"{peer} is gone")
        moves = [(local[1][here], theirs[peer]) for here, peer in zip(into, pieces, strict=True)]
        self.reads.append(ReadDouble(self.network, moves))
        return self.reads[-1]

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self.network.agents:
            raise ConnectionError(f"{peer} is gone")
        self.network.agents[peer].inbox.append(message)

    def notifications(self) -> list[bytes]:
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self) -> None:
        self.network.agents.pop(self.name, None)


class ReadDouble:
    """A `Transfer` that moves its bytes when it completes."""

    def __init__(self, network: Network, moves: list) -> None:
        self.network, self.moves = network, moves
        self.polls_left = network.polls_of_a_read
        self.is_released = False

    def state(self) -> State:
        assert not self.is_released
        if self.polls_left > 0:
            self.polls_left -= 1
            return "PROC"
        if self.network.state_after == "DONE":
            for (here, num_bytes), (peer, other) in self.moves:
                assert num_bytes == other
                ctypes.memmove(here, peer, num_bytes)
        return self.network.state_after

    def times(self) -> dict[str, float]:
        return {"bytes_transferred": sum(here[1] for here, _ in self.moves)}

    def release(self) -> bool:
        if self.network.state_after == "PROC" and not self.network.cancels:
            return False
        self.is_released = True
        return True


def make_caches(
    config: KVConnectorConfig, fill: bool, num_layers: int = 2, num_kv_heads: int = 2
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Make each layer's keys and values: a different number in every position, or zeros."""
    shape = (config.num_gpu_blocks, config.block_size, num_kv_heads, 8)
    numbers = torch.arange(2.0 * num_layers * math.prod(shape)).add(1).view(num_layers, 2, *shape) * fill
    return {f"layer {index}": tuple(part.clone() for part in pair) for index, pair in enumerate(numbers)}


class NixlEngine(PullEngine):
    """A NIXL engine over agents of a `Network`. Ranks before `rank` have only metadata."""

    def __init__(self, network: Network, engine_id: str, lease: float = 30.0, rank: int = 0, **others) -> None:
        extra = {"kv_lease_duration": lease, "handshake_timeout": 2.0, "read_timeout": PATIENCE}
        self.config = config = config_of(engine_id, extra=extra, **others)
        self.network = network
        self.caches = make_caches(config, fill=engine_id == "P")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
            patch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
            self.scheduler = NixlConnectorScheduler(config)
        metadata = {}
        for number in range(rank + 1):
            self.worker = NixlConnectorWorker(replace(config, tensor_parallel_rank=number), make_agent=network.agent)
            self.worker.register_kv_caches(self.caches)
            metadata[number] = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata(metadata)

    @property
    def agent(self):
        return self.worker._agent

    def close(self) -> None:
        agent = self.agent
        super().close()
        assert agent is None or agent.name not in self.network.agents
