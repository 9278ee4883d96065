"""What the two sides of the offloading connector tell each other.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/metadata.py` (`SimpleCPUOffloadMetadata`, `SimpleCPUOffloadWorkerMetadata`).
"""

from dataclasses import dataclass, field

from minivllm.core.kv_connector import KVConnectorMetadata


@dataclass(slots=True)
class LoadJob:
    """Blocks of the cache to be filled from blocks of the tier."""

    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(slots=True)
class StoreJob:
    """Blocks of the cache to be copied into blocks of the tier, `number`ed from 0 on."""

    number: int
    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(kw_only=True)
class OffloadMetadata(KVConnectorMetadata):
    """What the ranks do in a step: loads by request, begun before its forward pass; a store, begun after it.

    - `num_cpu_blocks`: of the tier, on each rank.
    - `need_flush`: stores begun by earlier steps must end first, since their blocks may be overwritten.
    """

    num_cpu_blocks: int
    loads: dict[str, LoadJob] = field(default_factory=dict)
    store: StoreJob | None = None
    need_flush: bool = False


@dataclass(slots=True)
class OffloadWorkerMetadata:
    """What one rank has done: the numbers of stores that have ended."""

    completed_stores: list[int]
