"""The messages between the two sides of the offloading connector.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/metadata.py` (`SimpleCPUOffloadMetadata`).
"""

from dataclasses import dataclass, field

from minivllm.core.kv_connector import KVConnectorMetadata


@dataclass(slots=True)
class BlockCopy:
    """Blocks of the cache and the blocks of the tier that they are copied to, or filled from."""

    block_ids: list[int]
    cpu_block_ids: list[int]


@dataclass(kw_only=True)
class OffloadMetadata(KVConnectorMetadata):
    """Orders to the ranks for one step; in return, the ranks report the numbers of finished stores.

    - `num_cpu_blocks`: blocks of the tier, on each rank.
    - `loads`: begun before the step's forward pass, by request.
    - `stores`: begun after it, by number.
    - `need_flush`: stores begun by earlier steps must end first, since their blocks may be
      overwritten.
    """

    num_cpu_blocks: int
    loads: dict[str, BlockCopy] = field(default_factory=dict)
    stores: dict[int, BlockCopy] = field(default_factory=dict)
    need_flush: bool = False
