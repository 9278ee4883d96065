"""The scheduler's side of the offloading connector: it decides what is stored, what is loaded, and
which blocks wait for a copy.

A step's store begins when its forward pass is over, so whatever the scheduler has published by then
can be stored. One more reference holds the blocks that the store reads until all ranks have
finished it. When memory is short, those references are dropped at once, and the ranks finish the
store before the next forward pass (`release_gpu_blocks`).

Each full block is stored as soon as it is computed.

In vLLM v0.33.0: `vllm/v1/simple_kv_offload/manager.py` (`SimpleCPUOffloadScheduler`). It can also
store blocks only when they would be evicted soon.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from minivllm.config.checks import require
from minivllm.config.units import GIB
from minivllm.core.block_hash import BlockHash
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorConfig, KVConnectorOutput, KVConnectorRole
from minivllm.core.kv_offload import CPUOffloadingManager, LookupResult
from minivllm.kv_connector.offload.metadata import BlockCopy, OffloadMetadata
from minivllm.kv_connector.offload.settings import OffloadSettings
from minivllm.logger import init_logger
from minivllm.platforms.device import pick_device
from minivllm.platforms.device_memory import refuse_beyond_memory

if TYPE_CHECKING:
    from minivllm.core.block_pool import BlockPool, KVCacheBlock
    from minivllm.core.request import Request
    from minivllm.core.scheduler_output import SchedulerOutput

logger = init_logger(__name__)


@dataclass(slots=True)
class _Followed:
    """A running request, and how many of its blocks have been offered to the tier."""

    request: "Request"
    num_offered: int = 0


@dataclass(slots=True)
class _Store:
    """A store in progress: its keys, the cache blocks that it holds, and how many ranks have not
    finished it.
    """

    keys: list[BlockHash]
    blocks: list["KVCacheBlock"]
    num_ranks_left: int


class OffloadScheduler(KVConnectorBase_V1):
    """The scheduler's side, which decides which blocks are stored and loaded."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> None:
        """Check the settings; raise `MinivllmError` for invalid ones."""
        super().__init__(config, role)
        self.settings = OffloadSettings.of(config.kv_transfer_config.kv_connector_extra_config)
        self.num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        self._followed: dict[str, _Followed] = {}
        self._loads: dict[str, Sequence[BlockHash]] = {}
        self._stores: dict[int, _Store] = {}
        self._num_stores = 0
        self._reported_usage = -1.0

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, int]) -> None:
        """Create the tier, now that the size of a block on each rank is known.

        Raises:
            MinivllmError: not even one block fits, or this machine has less memory.
        """
        record = sum(metadata.values())
        num_bytes = self.settings.cpu_bytes_to_use or 0
        # One block takes a record on every rank, together `record` bytes.
        num_blocks = self.settings.num_cpu_blocks or int(num_bytes // record)
        require(
            num_blocks >= 2,
            f"cpu_bytes_to_use is {num_bytes:,.0f}, and a block of {self.config.block_size} tokens takes {record:,}: "
            f"give it at least {2 * record:,} bytes",
        )
        num_blocks -= 1  # the null block, which takes no memory here
        advice = "give it less (kv_offloading_size)"
        refuse_beyond_memory(num_blocks * record, pick_device("cpu"), "the host tier", advice)
        self.manager = CPUOffloadingManager(num_blocks)
        logger.info(
            "Memory: %.3f GiB KV cache in host memory (%s blocks)", num_blocks * record / GIB, f"{num_blocks:,}"
        )
        self._metadata = self._no_orders()

    def _no_orders(self) -> OffloadMetadata:
        return OffloadMetadata(num_cpu_blocks=self.manager.num_blocks)

    def bind_gpu_block_pool(self, block_pool: "BlockPool") -> None:
        self.gpu_pool = block_pool

    # Loads

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Count the tokens that the tier can load: whole blocks, excluding the last token's. Nothing
        is evicted before `update_state_after_alloc`, which the scheduler calls next.
        """
        size = self.config.block_size
        # The tier has whole blocks only.
        if num_computed_tokens % size:
            return 0, False
        # Not the block of the last token, which is computed in any case.
        first, most = num_computed_tokens // size, (request.num_tokens - 1) // size
        # A prefix must be whole: stop at the first miss.
        keys = list(takewhile(self._is_hit, request.block_hashes[first:most]))
        if self.config.use_eagle:
            # The drafter's cache of a block depends on the token behind it, which may differ here.
            keys = keys[:-1]
        return len(keys) * size, bool(keys)

    def _is_hit(self, key: BlockHash) -> bool:
        return self.manager.lookup(key) is LookupResult.HIT

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """Order the promised load, pin what it reads, and follow the request from now on."""
        name = request.request_id
        self._followed[name] = _Followed(request)
        self.manager.touch(request.block_hashes)
        if not num_external_tokens:
            return
        # Blocks with a hash come from the prefix cache; those behind them are loaded.
        first = sum(1 for _ in takewhile(lambda block: block.block_hash is not None, blocks))
        last = first + num_external_tokens // self.config.block_size
        keys = self._loads[name] = request.block_hashes[first:last]
        block_ids = [block.block_id for block in blocks[first:last]]
        self._metadata.loads[name] = BlockCopy(block_ids, self.manager.prepare_load(keys))

    # Stores

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> OffloadMetadata:
        """Add the blocks to store after this step."""
        self._store(self._computed_blocks(scheduler_output.num_scheduled_tokens))
        metadata, self._metadata = self._metadata, self._no_orders()
        return metadata

    def _computed_blocks(self, num_scheduled_tokens: Mapping[str, int]) -> "dict[BlockHash, KVCacheBlock]":
        """Return the blocks of this step's requests that this step or an earlier one fills."""
        wanted: dict[BlockHash, KVCacheBlock] = {}
        size = self.config.block_size
        for name, num_tokens in num_scheduled_tokens.items():
            if (followed := self._followed.get(name)) is None:
                continue
            request = followed.request
            most = request.num_prompt_tokens if self.settings.offload_prompt_only else request.num_tokens
            num_full = min(request.num_computed_tokens + num_tokens, most) // size
            for place in range(followed.num_offered, min(num_full, len(request.block_hashes))):
                key = request.block_hashes[place]
                block = self.gpu_pool.get_cached_block(key)
                if block is None:
                    break  # published when its last token is known
                followed.num_offered = place + 1
                wanted[key] = block
        return wanted

    def _store(self, wanted: "dict[BlockHash, KVCacheBlock]") -> None:
        """Request that these blocks be stored, as far as the tier has room; blocks that are already
        there stay.
        """
        prepared = self.manager.prepare_store(wanted)
        if prepared is None or not prepared.keys_to_store:
            return
        blocks = [wanted[key] for key in prepared.keys_to_store]
        # One more reference keeps the blocks from being overwritten while they are copied.
        self.gpu_pool.touch(blocks)
        number, self._num_stores = self._num_stores, self._num_stores + 1
        self._stores[number] = _Store(prepared.keys_to_store, blocks, self.num_ranks)
        self._metadata.stores[number] = BlockCopy([block.block_id for block in blocks], prepared.block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Complete loads, and stores that all ranks have finished."""
        for name in connector_output.finished_recving:
            self.manager.complete_load(self._loads.pop(name, ()))
        for completed in connector_output.kv_connector_worker_meta or ():
            for number in completed:
                self._complete_store(number)

    def _complete_store(self, number: int) -> None:
        """Record that a rank has finished a store; after the last rank, its keys become hits."""
        if (store := self._stores.get(number)) is None:
            return  # it was begun before the engine had to start over
        store.num_ranks_left -= 1
        if store.num_ranks_left:
            return
        del self._stores[number]
        self._let_go(store)
        self.manager.complete_store(store.keys)

    def _let_go(self, store: _Store) -> bool:
        """Drop a store's references to cache blocks; return whether any of the blocks is free now."""
        blocks, store.blocks = store.blocks, []
        self.gpu_pool.free_blocks(reversed(blocks))
        return any(block.ref_cnt == 0 for block in blocks)  # requests may still hold the others

    def release_gpu_blocks(self) -> bool:
        """Drop the references of stores in progress, which the ranks finish before the next forward
        pass.
        """
        stores = [store for store in self._stores.values() if store.blocks]
        if stores:
            self._metadata.need_flush = True
        # A list and not a generator: `any` would stop at the first one.
        freed = [self._let_go(store) for store in stores]
        return any(freed)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Stop following the request. Its keys are touched once more, since it used them all until
        now.
        """
        self._followed.pop(request.request_id, None)
        self.manager.touch(request.block_hashes)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Return whether any stores are in progress."""
        return bool(self._stores)

    def reset_cache(self) -> bool:
        """Forget all keys; return False while a copy is in progress."""
        return self.manager.reset()

    def start_over(self) -> None:
        """Forget everything, including all keys: a failed step may have stored anything."""
        self._loads.clear()
        self._stores.clear()
        self._followed.clear()
        self.manager = CPUOffloadingManager(self.manager.num_blocks)
        self._metadata = self._no_orders()

    def tier_state(self) -> dict[str, int]:
        return {
            "blocks": self.manager.num_blocks,
            "used": self.manager.num_used_blocks,
            "loading": sum(map(len, self._loads.values())),
            "storing": self.manager.num_pending_blocks,
        }

    def take_stats(self) -> dict[str, Any] | None:
        """Return the fraction of the tier in use, if it has changed."""
        usage = (self.manager.num_used_blocks + self.manager.num_pending_blocks) / self.manager.num_blocks
        if usage == self._reported_usage:
            return None
        self._reported_usage = usage
        return {"kv_offload_cpu_cache_usage_perc": usage}
