"""The checked `kv_connector_extra_config` of NIXL's connector."""

from minivllm.config.checks import positive_seconds, refuse_unknown, require
from minivllm.core.kv_connector import KVConnectorConfig

SECONDS = {"kv_lease_duration": 30.0, "handshake_timeout": 5.0, "read_timeout": 60.0}
"""Keys of times, and what they are by default."""
BACKENDS = ["UCX"]


def check_settings(config: KVConnectorConfig) -> tuple[dict[str, float], list[str]]:
    """Return the checked times, in seconds (see `SECONDS`), and NIXL's backends.

    Raises:
        MinivllmError: a key is unknown, a value is invalid, or the connector cannot serve this engine.
    """
    transfer = config.kv_transfer_config
    require(
        config.pipeline_parallel_size == 1, "NixlConnector needs pipeline_parallel_size 1: use tensor_parallel_size"
    )
    require(
        transfer.kv_buffer_device in (None, config.device),
        f"kv_buffer_device is {transfer.kv_buffer_device!r} and the cache is on {config.device!r}: NixlConnector reads "
        "the cache itself, so leave kv_buffer_device out",
    )
    refuse_unknown("NixlConnector has no setting", transfer.kv_connector_extra_config, (*SECONDS, "backends"))
    backends = transfer.get_from_extra_config("backends", BACKENDS)
    require(
        isinstance(backends, list) and bool(backends) and all(isinstance(name, str) for name in backends),
        f'backends is {backends!r}; it must be a list of names, such as ["UCX"]',
    )
    times = {name: transfer.get_from_extra_config(name, default) for name, default in SECONDS.items()}
    return {name: positive_seconds(name, seconds) for name, seconds in times.items()}, backends
