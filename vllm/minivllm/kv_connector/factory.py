"""Connectors by name.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/factory.py` (`KVConnectorFactory`).
"""

import importlib

from minivllm.config import NO_PARTS, Parts
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError

CONNECTORS = {
    "ExampleConnector": "minivllm.kv_connector.example.connector",
    "NixlConnector": "minivllm.kv_connector.nixl.connector",
    "OffloadingConnector": "minivllm.kv_connector.offload.connector",
    "SimpleCPUOffloadConnector": "minivllm.kv_connector.offload.connector",
    "TCPConnector": "minivllm.kv_connector.tcp.connector",
}
"""The module of each connector, which is imported only when it is used."""


def get_connector_class(name: str) -> type[KVConnectorBase_V1]:
    """Return the connector of this name.

    Raises:
        MinivllmError: there is none, or what it needs is not installed.
    """
    if name not in CONNECTORS:
        raise MinivllmError(f"there is no kv_connector {name!r}; there are: {', '.join(CONNECTORS)}")
    return getattr(importlib.import_module(CONNECTORS[name]), name)


def create_connector(config: KVConnectorConfig, role: KVConnectorRole, parts: Parts = NO_PARTS) -> KVConnectorBase_V1:
    """Create one side of the connector that the settings name, or of that which takes its place.

    Raises:
        MinivllmError: there is no such connector, or it cannot work with these settings.
    """
    make = parts.kv_connector or get_connector_class(config.kv_transfer_config.kv_connector)
    return make(config, role)
