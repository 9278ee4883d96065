"""What `kv_connector_extra_config` says to the TCP connector, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minivllm.config.checks import positive_seconds
from minivllm.core.kv_connector import KVConnectorConfig
from minivllm.errors import MinivllmError
from minivllm.kv_connector.tcp.secret import secret_of

NAMES = ("host", "port", "secret", "kv_lease_duration", "timeout", "layerwise")


@dataclass(frozen=True, slots=True)
class TCPSettings:
    """The settings of the TCP connector.

    - `host`, `port`: where rank 0 of core 0 listens, and what other engines are told; port 0 takes any free one, and
      the ranks of all cores take the ports that follow.
    - `secret`: what both sides know; by default from the environment (`MINIVLLM_KV_TRANSFER_SECRET`).
    - `lease_duration`: seconds for which blocks are kept for others without a sign of life.
    - `timeout`: seconds that one frame may take.
    - `layerwise`: a decode engine loads within the step, layer by layer as the forward pass needs them.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    lease_duration: float
    timeout: float
    layerwise: bool

    @classmethod
    def of(cls, config: KVConnectorConfig) -> TCPSettings:
        """Reads and checks them. Raises `MinivllmError` for an unknown key, a wrong value, or an engine not served."""
        extra = config.kv_transfer_config.kv_connector_extra_config
        for name in extra:
            if name not in NAMES:
                raise MinivllmError(f"TCPConnector has no setting {name!r}; there are: {', '.join(NAMES)}")
        if config.pipeline_parallel_size > 1:
            raise MinivllmError("TCPConnector needs pipeline_parallel_size 1: use tensor_parallel_size")
        host = _of_type(extra, "host", str, "127.0.0.1", "a name or an address of this machine")
        if host in ("", "0.0.0.0", "::"):
            raise MinivllmError(
                f"host is {host!r}; other engines are told it, so it must be one of this machine's addresses"
            )
        port = _of_type(extra, "port", int, 0, "a port from 0 (any free one) to 65535")
        ranks = config.tensor_parallel_size * (1 + config.data_parallel_rank)
        if not (port >= 0 and port + ranks <= 65536) or (port == 0 and config.tensor_parallel_size > 1):
            raise MinivllmError(
                f"port is {port}; it must be a port from 1 to {65536 - ranks}, which rank 0 takes, and the other ranks "
                "those that follow (0, any free one, is for one rank alone)"
            )
        return cls(
            host=host,
            port=port,
            secret=secret_of(extra.get("secret")),
            lease_duration=positive_seconds("kv_lease_duration", extra.get("kv_lease_duration", 30.0)),
            timeout=positive_seconds("timeout", extra.get("timeout", 10.0)),
            layerwise=_of_type(extra, "layerwise", bool, False, "true or false"),
        )

    def address_of(self, config: KVConnectorConfig) -> tuple[str, int]:
        """Where this rank listens."""
        first = config.data_parallel_rank * config.tensor_parallel_size
        return self.host, self.port and self.port + first + config.tensor_parallel_rank


def _of_type(extra: Any, name: str, kind: type[Any], default: Any, wanted: str) -> Any:
    value = extra.get(name, default)
    if type(value) is not kind:
        raise MinivllmError(f"{name} is {value!r}; it must be {wanted}")
    return value
