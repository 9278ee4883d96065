"""The checked `kv_connector_extra_config` of NIXL's connector."""

from minivllm.config.checks import positive_seconds, refuse_unknown, require
from minivllm.core.kv_connector import KVConnectorConfig

SECONDS = {"kv_lease_duration": 30.0, "handshake_timeout": 5.0, "read_timeout": 60.0}
"""Keys of times, and what they are by default."""


def check_settings(config: KVConnectorConfig) -> dict[str, float]:
    """Return the checked times, in seconds (see `SECONDS`).

    Raises:
        MinivllmError: a key is unknown, a value is invalid, or the connector cannot serve this engine.
    """
    require(
        config.pipeline_parallel_size == 1, "NixlConnector needs pipeline_parallel_size 1: use tensor_parallel_size"
    )
    extra = config.kv_transfer_config.kv_connector_extra_config
    refuse_unknown("NixlConnector has no setting", extra, SECONDS)
    return {name: positive_seconds(name, seconds) for name, seconds in {**SECONDS, **extra}.items()}
