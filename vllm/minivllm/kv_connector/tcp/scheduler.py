"""The scheduler's side of the TCP connector: what all that pull do, and where the ranks listen."""

from collections.abc import Mapping
from typing import Any

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.kv_connector.pull_scheduler import PullConnectorScheduler
from minivllm.kv_connector.tcp.settings import TCPSettings


class TCPConnectorScheduler(PullConnectorScheduler):
    """Rank 0's address is what other engines are told."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> None:
        """Raise `MinivllmError` for settings that it does not know or cannot serve."""
        settings = TCPSettings.of(config)
        super().__init__(config, role, settings.lease_duration)
        self.host, self.port = settings.host, settings.port

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self.port = metadata.get(0) or self.port
