"""Keys and values from another engine over plain TCP, for where NIXL is not installed.

The protocol between proxy and engines is NIXL's (`kv_transfer_params`, leases, heartbeats, release when read), so both
schedulers decide alike. What differs is how bytes move: the prefill engine's ranks answer in threads (`tcp.worker`),
frames are authenticated and checked (`tcp.transport`), blocks are gathered and scattered by a kernel (`tcp.staging`).

With `kv_connector_extra_config` {"layerwise": true} a decode engine admits a request at once and loads within the
step: each layer's attention waits only for its own layer. By default requests wait outside of the batch, and nobody
else waits for them.

Not in vLLM v0.33.0, whose connector for plain TCP (`P2pNcclConnector`, over ZeroMQ and NCCL) needs GPUs.
"""

from typing import TYPE_CHECKING

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.kv_connector.pull_connector import PullConnector
from minivllm.kv_connector.tcp.scheduler import TCPConnectorScheduler
from minivllm.kv_connector.tcp.settings import TCPSettings

if TYPE_CHECKING:
    from minivllm.kv_connector.tcp.worker import TCPConnectorWorker


class TCPConnector(PullConnector):
    """Both sides. Layer by layer, a step's attention also waits for loads."""

    worker_side: "TCPConnectorWorker"

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Raises `MinivllmError` for settings that it does not know or cannot serve."""
        super().__init__(config, role)
        settings = TCPSettings.of(config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_side = TCPConnectorScheduler(config, settings)
            return
        from minivllm.kv_connector.tcp.worker import TCPConnectorWorker  # torch

        self.worker_side = TCPConnectorWorker(config, settings)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `TCPConnectorWorker`."""
        self.worker_side.wait_for_layer_load(layer_name)

    def wait_for_save(self) -> None:
        """See `TCPConnectorWorker`."""
        self.worker_side.wait_for_save()
