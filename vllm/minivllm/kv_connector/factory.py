"""Look up connectors by name.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/factory.py` (`KVConnectorFactory`).
There, a connector is one class, which delegates to a scheduler or worker object of its own; here
those two objects are the connector.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from minivllm.config import NO_PARTS, Parts
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError

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


def get_connector_class(name: str, role: KVConnectorRole) -> type[KVConnectorBase_V1]:
    """Return one side of the connector of this name.

    Raises:
        MinivllmError: there is no such connector, or a package that it needs is not installed.
    """
    if name not in CONNECTORS:
        raise MinivllmError(f"there is no kv_connector {name!r}; use one of: {', '.join(CONNECTORS)}")
    module, _, side = CONNECTORS[name][role.value].rpartition(".")
    return getattr(importlib.import_module(f"minivllm.kv_connector.{module}"), side)


def create_connector(config: KVConnectorConfig, role: KVConnectorRole, parts: Parts = NO_PARTS) -> KVConnectorBase_V1:
    """Create one side of the connector that the settings name, or of the part that replaces it.

    Raises:
        MinivllmError: there is no such connector, or it cannot work with these settings.
    """
    make = parts.kv_connector or get_connector_class(config.kv_transfer_config.kv_connector, role)
    return make(config, role)


def connect_ranks(handshakes: Sequence[tuple[KVConnectorConfig, Any]], parts: Parts) -> KVConnectorBase_V1:
    """Create the scheduler's side, which learns how to reach the ranks; `handshakes` has what
    `Worker.initialize_kv_connector` returned on each of them.
    """
    # All ranks return the same config but for their rank; the scheduler's side takes rank 0's.
    connector = create_connector(handshakes[0][0], KVConnectorRole.SCHEDULER, parts)
    connector.set_xfer_handshake_metadata({rank: metadata for rank, (_, metadata) in enumerate(handshakes)})
    return connector
