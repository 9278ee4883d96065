"""The checked `kv_connector_extra_config` of NIXL's connector."""

from minivllm.config.checks import positive_seconds, refuse_unknown
from minivllm.core.kv_connector import KVConnectorConfig

SECONDS = {"kv_lease_duration": 30.0, "handshake_timeout": 5.0, "read_timeout": 60.0}
"""Keys of times, and what they are by default."""


def check_settings(config: KVConnectorConfig) -> dict[str, float]:
    """Return the checked times, in seconds (see `SECONDS`).

    Raises:
        MinivllmError: a key is unknown, or a value is invalid.
    """
    extra = config.kv_transfer_config.kv_connector_extra_config
    refuse_unknown("NixlConnector has no setting", extra, SECONDS)
    return {name: positive_seconds(name, seconds) for name, seconds in {**SECONDS, **extra}.items()}
