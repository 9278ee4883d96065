"""What the two sides of the offloading connector tell each other.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/metadata.py` (`SimpleCPUOffloadMetadata`, `SimpleCPUOffloadWorkerMetadata`).
"""

from dataclasses import dataclass, field

from minivllm.core.kv_connector import KVConnectorMetadata


@dataclass(slots=True)
class LoadJob:
    """Blocks of the cache to be filled: from blocks of the tier, and from files."""

    block_ids: list[int] = field(default_factory=list)
    cpu_block_ids: list[int] = field(default_factory=list)
    disk_block_ids: list[int] = field(default_factory=list)
    disk_keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class StoreJob:
    """Blocks of the cache to be copied into blocks of the tier, `number`ed from 0 on.

    `spills`: keys, and blocks of the tier, that are written to files before they are overwritten.
    """

    number: int
    block_ids: list[int]
    cpu_block_ids: list[int]
    spills: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass(kw_only=True)
class OffloadMetadata(KVConnectorMetadata):
    """What the ranks do in a step: loads by request, begun before its forward pass; a store, begun after it.

    - `num_cpu_blocks`: of the tier, on each rank. `disk_folder`: of the files; None: there are none.
    - `need_flush`: stores begun by earlier steps must end first, since their blocks may be overwritten.
    - `removals`: files that are not needed any more. `clear_disk`: none is.
    """

    num_cpu_blocks: int
    disk_folder: str | None = None
    loads: dict[str, LoadJob] = field(default_factory=dict)
    store: StoreJob | None = None
    need_flush: bool = False
    removals: list[bytes] = field(default_factory=list)
    clear_disk: bool = False


@dataclass(slots=True)
class OffloadWorkerMetadata:
    """What one rank has done: stores that have ended, keys whose file could not be written, or not be read.

    `disk_failed`: the disk takes no more files.
    """

    completed_stores: list[int] = field(default_factory=list)
    unwritten: set[bytes] = field(default_factory=set)
    unreadable: set[bytes] = field(default_factory=set)
    disk_failed: bool = False

    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.completed_stores or self.unwritten or self.unreadable or self.disk_failed)
