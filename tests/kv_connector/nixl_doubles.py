"""Agents that move bytes within this process, and what a connector is made of in tests."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from minivllm.config.kv_transfer import KVTransferConfig
from minivllm.core.kv_connector import KVConnectorConfig
from minivllm.kv_connector.nixl.agent import Region, State, TransferTimes

CONFIG = KVConnectorConfig(
    kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", engine_id="an engine"),
    model_fingerprint="a model",
    block_size=4,
    num_gpu_blocks=16,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    kv_cache_dtype="float32",
    max_model_len=64,
)


def config_of(engine_id: str = "an engine", role: str = "kv_both", extra: dict | None = None, **others):
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", engine_id=engine_id, kv_role=role, kv_connector_extra_config=extra or {}
    )
    return replace(CONFIG, kv_transfer_config=transfer, **others)


@dataclass
class Network:
    """Which agents there are, and what befalls their transfers."""

    agents: dict[str, "AgentDouble"] = field(default_factory=dict)
    polls_of_a_read: int = 0
    state_after: State = "DONE"
    cancels: bool = True

    def agent(self, name: str, backends: Sequence[str] = ("UCX",)) -> "AgentDouble":
        self.agents[name] = AgentDouble(name, self)
        return self.agents[name]


class AgentDouble:
    """An agent without NIXL; `released` counts what was prepared and is not any more."""

    def __init__(self, name: str, network: Network) -> None:
        self.name, self.network = name, network
        self.inbox: list[bytes] = []
        self.prepared: list[str | None] = []
        self.reads: list[ReadDouble] = []
        self.is_closed = False

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

    def read(self, local, into: np.ndarray, remote, pieces: np.ndarray, notification: bytes) -> "ReadDouble":
        peer, theirs = remote
        if peer not in self.network.agents:
            raise ConnectionError(f"{peer} is gone")
        moves = [(local[1][here], theirs[there]) for here, there in zip(into, pieces, strict=True)]
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
        self.is_closed = True


class ReadDouble:
    """A `Transfer` that moves its bytes when it is over."""

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
            for (here, num_bytes), (there, other) in self.moves:
                assert num_bytes == other
                ctypes.memmove(here, there, num_bytes)
        return self.network.state_after

    def times(self) -> TransferTimes:
        return TransferTimes(0.001, 0.002, sum(here[1] for here, _ in self.moves), len(self.moves))

    def release(self) -> bool:
        if self.network.state_after == "PROC" and not self.network.cancels:
            return False
        self.is_released = True
        return True


def make_caches(config: KVConnectorConfig, fill: bool) -> dict[str, tuple[torch.Tensor, ...]]:
    """Keys and values of each layer; numbers that are found nowhere twice, or zeros."""
    shape = (config.num_gpu_blocks, config.block_size, config.num_kv_heads, config.head_dim)
    size = int(np.prod(shape))
    make = [torch.zeros(shape), torch.zeros(shape)]
    caches = {}
    for layer in range(config.num_layers):
        start = 2 * layer * size + 1
        make = [torch.arange(start + part * size, start + (part + 1) * size).float().view(shape) for part in (0, 1)]
        caches[f"layer {layer}"] = tuple(make) if fill else (torch.zeros(shape), torch.zeros(shape))
    return caches
