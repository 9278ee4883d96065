"""The checked `kv_connector_extra_config` of the TCP connector, and the secret that its engines
share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from minivllm.config.checks import positive_seconds, refuse_unknown, require
from minivllm.core.kv_connector import KVConnectorConfig

SECRET_VARIABLE = "MINIVLLM_KV_TRANSFER_SECRET"
SECONDS = {"kv_lease_duration": 30.0, "timeout": 10.0}
LEAST_SECRET = 16
"""Characters: fewer could be guessed."""


@dataclass(frozen=True, slots=True)
class TCPSettings:
    """The settings of the TCP connector.

    - `host`, `port`: where rank 0 listens and other engines connect; port 0 takes any free one, and
      the other ranks take the ports that follow.
    - `secret`: a secret that both sides share; by default from the environment
      (`MINIVLLM_KV_TRANSFER_SECRET`).
    - `lease_duration`: seconds for which blocks are kept for others without a heartbeat.
    - `timeout`: seconds that one frame may take.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    lease_duration: float
    timeout: float

    @classmethod
    def of(cls, config: KVConnectorConfig) -> TCPSettings:
        """Read and check them. Raise `MinivllmError` for an unknown key or a wrong value."""
        extra = config.kv_transfer_config.kv_connector_extra_config
        refuse_unknown("TCPConnector has no setting", extra, ("host", "port", "secret", *SECONDS))
        host, port = extra.get("host", "127.0.0.1"), extra.get("port", 0)
        require(
            isinstance(host, str) and host not in ("", "0.0.0.0", "::"),
            f"host is {host!r}; other engines connect to it, so it must be a name or an address of this machine",
        )
        ranks = config.tensor_parallel_size  # each takes a port
        require(
            type(port) is int and (config.tensor_parallel_size > 1) <= port <= 65536 - ranks,
            f"port is {port!r}; it must be a port from 1 to {65536 - ranks}: rank 0 takes it, and the other ranks "
            "those that follow (0, any free one, works with one rank only)",
        )
        secret: Any = extra.get("secret", os.environ.get(SECRET_VARIABLE))
        require(
            isinstance(secret, str) and len(secret) >= LEAST_SECRET,
            f"engines that exchange keys and values over TCP need a secret of at least {LEAST_SECRET} characters: set "
            f"{SECRET_VARIABLE} (or kv_connector_extra_config.secret) to the same text on both sides",
        )
        seconds = [positive_seconds(name, extra.get(name, default)) for name, default in SECONDS.items()]
        return cls(host, port, secret.encode(), *seconds)

    def address_of(self, config: KVConnectorConfig) -> tuple[str, int]:
        """Return the address at which this rank listens."""
        return self.host, self.port and self.port + config.tensor_parallel_rank
