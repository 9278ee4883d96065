"""A second tier of the KV cache in host memory: `kv_offloading_size`.

It extends the prefix cache. What the first tier has computed is copied out, and a request whose prefix the first tier
does not have any more gets it back by a copy, while others run. See `core.kv_offload` for the books,
`offload.scheduler` for what is copied when, `offload.worker` for how.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`
(`SimpleCPUOffloadConnector`). Its `OffloadingConnector` is the same here: options of both are taken.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.core.kv_connector import (
    KVCaches,
    KVConnectorBase_V1,
    KVConnectorConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferParams,
)
from minivllm.kv_connector.offload.metadata import OffloadMetadata, OffloadWorkerMetadata
from minivllm.kv_connector.offload.scheduler import OffloadScheduler
from minivllm.kv_connector.offload.settings import OffloadSettings

if TYPE_CHECKING:
    import torch

    from minivllm.core.block_pool import BlockPool, KVCacheBlock
    from minivllm.core.output import SchedulerOutput
    from minivllm.core.request import Request
    from minivllm.kv_connector.offload.worker import OffloadWorker


class SimpleCPUOffloadConnector(KVConnectorBase_V1):
    """Both sides. See `KVConnectorBase_V1` for the methods that have no words here."""

    scheduler_side: OffloadScheduler
    worker_side: "OffloadWorker"

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Reads the settings.

        Raises:
            MinivllmError: they cannot be.
        """
        super().__init__(config, role)
        settings = OffloadSettings.of(config.kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = OffloadScheduler(config, settings)
            return
        from minivllm.kv_connector.offload.worker import OffloadWorker  # torch

        self.worker_side = OffloadWorker()

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """See `KVConnectorBase_V1`."""
        self.worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> int:
        """The bytes of a block on this rank."""
        return self.worker_side.regions.record_bytes

    def start_load_kv(self) -> None:
        """See `KVConnectorBase_V1`."""
        self.worker_side.start_load_kv(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `KVConnectorBase_V1`."""
        self.worker_side.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: "tuple[torch.Tensor, ...]", attn_metadata: Any) -> None:
        """Nothing: blocks are stored whole, after the forward pass."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`."""
        self.worker_side.wait_for_save(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `KVConnectorBase_V1`."""
        return set(), self.worker_side.get_finished()

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """See `KVConnectorBase_V1`."""
        return self.worker_side.get_kv_connector_stats()

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """See `KVConnectorBase_V1`."""
        return self.worker_side.build_connector_worker_meta()

    def reset(self) -> None:
        """See `KVConnectorBase_V1`."""
        self.worker_side.reset()

    @property
    def _step(self) -> OffloadMetadata:
        assert isinstance(self._connector_metadata, OffloadMetadata)
        return self._connector_metadata

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Makes the tier, now that the bytes of a block are known."""
        self.scheduler_side.set_block_bytes([metadata[rank] for rank in sorted(metadata)])

    def bind_gpu_block_pool(self, block_pool: "BlockPool") -> None:
        """See `KVConnectorBase_V1`."""
        self.scheduler_side.bind_gpu_block_pool(block_pool)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """See `KVConnectorBase_V1`."""
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnectorBase_V1`."""
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.has_pending_block_frees()

    def release_gpu_blocks(self) -> bool:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.release_gpu_blocks()

    def reset_cache(self) -> bool:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.reset_cache()

    def start_over(self) -> None:
        """See `KVConnectorBase_V1`."""
        self.scheduler_side.start_over()

    def take_stats(self) -> dict[str, Any] | None:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.take_stats()

    def tier_state(self) -> dict[str, int]:
        """See `KVConnectorBase_V1`."""
        return self.scheduler_side.state()

    # Both sides

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self.role is KVConnectorRole.WORKER:
            self.worker_side.shutdown()


OffloadingConnector = SimpleCPUOffloadConnector
"""vLLM's other name for such a tier."""
