"""A connector that pulls, both sides as one object: what it is asked goes to the side that it is.

What differs from one connector to another is in the two sides: how engines find each other, and how bytes move.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.core.kv_connector import (
    KVCaches,
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferParams,
)
from minivllm.kv_connector.pull_scheduler import PullConnectorMetadata, PullConnectorScheduler

if TYPE_CHECKING:
    import torch

    from minivllm.core.block_pool import KVCacheBlock
    from minivllm.core.output import SchedulerOutput
    from minivllm.core.request import Request


class WorkerSide(Protocol):
    """What moves the bytes on a rank: `KVConnectorBase_V1` tells when each method is called."""

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Where the cache is."""
        ...

    def get_handshake_metadata(self) -> Any:
        """What other engines need to reach this rank."""
        ...

    def start_load_kv(self, metadata: Any) -> None:
        """Takes in what the scheduler's side has decided for this step, and begins what can begin."""
        ...

    def get_finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks need not be kept any more, and those whose reads have ended, well or not."""
        ...

    def take_failed(self) -> set[str]:
        """For `get_failed_recving`."""
        ...

    def take_invalid_block_ids(self) -> set[int]:
        """For `get_block_ids_with_load_errors`."""
        ...

    def take_stats(self) -> dict[str, Any] | None:
        """For `get_kv_connector_stats`."""
        ...

    def take_told(self) -> list[str] | None:
        """For `build_connector_worker_meta`: whose prefill engine knows that its blocks are not wanted, or cannot."""
        ...

    def reset(self) -> None:
        """Gives up all reads."""
        ...

    def shutdown(self) -> None:
        """Ends threads and connections."""
        ...


class PullConnector(KVConnectorBase_V1):
    """Has one of the two sides. The scheduler's imports no torch."""

    scheduler_side: PullConnectorScheduler
    worker_side: WorkerSide

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """See `WorkerSide`."""
        self.worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Any:
        """See `WorkerSide`."""
        return self.worker_side.get_handshake_metadata()

    def start_load_kv(self) -> None:
        """See `WorkerSide`."""
        assert isinstance(self._connector_metadata, PullConnectorMetadata)
        self.worker_side.start_load_kv(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: "tuple[torch.Tensor, ...]", attn_metadata: Any) -> None:
        """Nothing is saved: others read the cache itself."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `WorkerSide`."""
        return self.worker_side.get_finished()

    def get_failed_recving(self) -> set[str]:
        """See `WorkerSide`."""
        return self.worker_side.take_failed()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `WorkerSide`."""
        return self.worker_side.take_invalid_block_ids()

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """See `WorkerSide`."""
        return self.worker_side.take_stats()

    def build_connector_worker_meta(self) -> list[str] | None:
        """See `WorkerSide`."""
        return self.worker_side.take_told()

    def reset(self) -> None:
        """See `WorkerSide`."""
        self.worker_side.reset()

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """See `PullConnectorScheduler`."""
        self.scheduler_side.set_xfer_handshake_metadata(metadata)

    def on_new_request(self, request: "Request") -> None:
        """See `PullConnectorScheduler`."""
        self.scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `PullConnectorScheduler`."""
        return self.scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """See `PullConnectorScheduler`."""
        self.scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> PullConnectorMetadata:
        """See `PullConnectorScheduler`."""
        return self.scheduler_side.build_connector_meta()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `PullConnectorScheduler`."""
        self.scheduler_side.update_connector_output(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """See `PullConnectorScheduler`."""
        return self.scheduler_side.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """See `PullConnectorScheduler`."""
        return self.scheduler_side.has_pending_block_frees()

    def start_over(self) -> None:
        """See `PullConnectorScheduler`."""
        self.scheduler_side.start_over()

    # Both

    def shutdown(self) -> None:
        """See the two sides."""
        (self.scheduler_side if self.role is KVConnectorRole.SCHEDULER else self.worker_side).shutdown()
