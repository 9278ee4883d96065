"""The scheduler's side of the TCP connector: what all connectors that pull have in common, plus the
ranks' address.
"""

from collections.abc import Mapping
from typing import Any

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.kv_connector.pull_scheduler import PullConnectorScheduler
from minivllm.kv_connector.tcp.settings import TCPSettings


class TCPConnectorScheduler(PullConnectorScheduler):
    """The scheduler's side, which gives other engines the address of rank 0."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> None:
        """Check the settings; raise `MinivllmError` for settings that are unknown or not supported."""
        settings = TCPSettings.of(config)
        super().__init__(config, role, settings.lease_duration)
        self.host, self.port = settings.host, settings.port

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self.port = metadata.get(0) or self.port
