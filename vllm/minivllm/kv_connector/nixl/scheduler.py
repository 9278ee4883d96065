"""The scheduler's side of NIXL's connector: the logic shared by all connectors that pull, plus the
side channel.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py`.
"""

import os
from collections.abc import Mapping
from typing import Any

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorRole
from minivllm.errors import MinivllmError
from minivllm.kv_connector.nixl.settings import check_settings
from minivllm.kv_connector.nixl.side_channel import NixlSideChannel
from minivllm.kv_connector.pull_params import GENERATIONS_JOINED_BY
from minivllm.kv_connector.pull_scheduler import PullConnectorScheduler

HOST_VARIABLE, PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
DEFAULT_HOST, DEFAULT_PORT = "localhost", 5600


class NixlConnectorScheduler(PullConnectorScheduler):
    """The scheduler's side, which opens the side channel and tells other engines where it is."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> None:
        """Check the settings, without importing nixl; raise `MinivllmError` for settings that are
        unknown or not supported.
        """
        super().__init__(config, role, check_settings(config)["kv_lease_duration"])
        self.host, self.port = side_channel_address()
        self._side_channel: NixlSideChannel | None = None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Open the side channel if this engine is a producer. Raise `MinivllmError` if the channel
        cannot be opened.
        """
        if not self.config.kv_transfer_config.is_kv_producer:
            return
        self.generation = GENERATIONS_JOINED_BY.join(generation for generation, _ in metadata.values())
        payloads = {rank: payload for rank, (_, payload) in metadata.items()}
        self._side_channel = NixlSideChannel(self.host, self.port, payloads, self.is_held)

    def shutdown(self) -> None:
        if self._side_channel is not None:
            self._side_channel.close()
            self._side_channel = None


def side_channel_address(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port of the side channel, which the environment sets.

    Raises:
        MinivllmError: that port is invalid.
    """
    port = environment.get(PORT_VARIABLE) or str(DEFAULT_PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise MinivllmError(f"{PORT_VARIABLE} is {port!r}; it must be a port from 1 to 65535, such as 5600")
    return environment.get(HOST_VARIABLE) or DEFAULT_HOST, int(port)
