"""Look up connectors by name.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/factory.py` (`KVConnectorFactory`).
There, a connector is one class, which delegates to a scheduler or worker object of its own; here
those two objects are the connector.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError

Make = Callable[[KVConnectorConfig, KVConnectorRole], KVConnectorBase_V1]
TIER = "offload.scheduler.OffloadScheduler", "offload.worker.OffloadWorker"
CONNECTORS = {
    "ExampleConnector": ("example.connector.ExampleConnector", "example.connector.ExampleConnector"),
    "NixlConnector": ("nixl.scheduler.NixlConnectorScheduler", "nixl.worker.NixlConnectorWorker"),
    "OffloadingConnector": TIER,
    "SimpleCPUOffloadConnector": TIER,
    "TCPConnector": ("tcp.scheduler.TCPConnectorScheduler", "tcp.worker.TCPConnectorWorker"),
}
"""Where the scheduler's and the worker's side of each lie in this package. A side is imported
when it is made.
"""


def create_connector(config: KVConnectorConfig, role: KVConnectorRole, own: Make | None = None) -> KVConnectorBase_V1:
    """Create one side of the connector that the settings name, or of `own`, the part that replaces
    it.

    Raises:
        MinivllmError: there is no such connector, a package that it needs is not installed, or it
            cannot work with these settings.
    """
    if own is not None:
        return own(config, role)
    name = config.kv_transfer_config.kv_connector
    if name not in CONNECTORS:
        raise MinivllmError(f"there is no kv_connector {name!r}; use one of: {', '.join(CONNECTORS)}")
    module, _, side = CONNECTORS[name][role.value].rpartition(".")
    return getattr(importlib.import_module(f"minivllm.kv_connector.{module}"), side)(config, role)


def connect_ranks(handshakes: Sequence[tuple[KVConnectorConfig, Any]], own: Make | None) -> KVConnectorBase_V1:
    """Create the scheduler's side, which learns how to reach the ranks; `handshakes` has what
    `Worker.initialize_kv_connector` returned on each of them.
    """
    # All ranks return the same config but for their rank; the scheduler's side takes rank 0's.
    connector = create_connector(handshakes[0][0], KVConnectorRole.SCHEDULER, own)
    connector.set_xfer_handshake_metadata({rank: metadata for rank, (_, metadata) in enumerate(handshakes)})
    return connector
