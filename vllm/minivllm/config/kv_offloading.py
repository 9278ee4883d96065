"""Turn `kv_offloading_size` into the connector that keeps a second tier of the KV cache in host
memory. No torch.

In vLLM v0.33.0: `_post_init_kv_transfer_config` in `vllm/config/vllm.py`; `kv_offloading_size` in
`vllm/config/cache.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minivllm.config.checks import is_number, require
from minivllm.config.kv_transfer import KVTransferConfig
from minivllm.config.units import GIB

MOST_GIB = 1 << 20
OFFLOADING_CONNECTORS = ("SimpleCPUOffloadConnector", "OffloadingConnector")


def with_offloading(
    transfer: "Mapping[str, Any] | KVTransferConfig | None", size: float | None
) -> KVTransferConfig | None:
    """Return the connector settings of an engine: those of `kv_transfer_config`, or those of the
    tier.

    A `kv_transfer_config` without a connector, or with the tier's, sets further options of the tier.

    Raises:
        MinivllmError: the same as `KVTransferConfig.of`; the size is not above 0; or both a tier and
            another connector are set.
    """
    if size is None:
        return KVTransferConfig.of(transfer)
    is_size = is_number(size) and 0 < size < MOST_GIB
    require(is_size, f"kv_offloading_size is {size!r}; it must be a number of GiB above 0, below {MOST_GIB:,}")
    # `kv_offloading_size` alone stands for the whole connector.
    if transfer is None or (isinstance(transfer, Mapping) and "kv_connector" not in transfer):
        transfer = {"kv_connector": OFFLOADING_CONNECTORS[0], **(transfer or {})}
    config = KVTransferConfig.of(transfer)
    assert config is not None
    # The dictionary's own entries go before this one.
    extra = {"cpu_bytes_to_use": int(size * GIB)}
    require(
        is_tier(config),
        f"an engine has one connector: leave out kv_offloading_size, or the kv_connector {config.kv_connector!r}",
    )
    return replace(config, kv_connector_extra_config={**extra, **config.kv_connector_extra_config})


def is_tier(transfer: KVTransferConfig | None) -> bool:
    """Return whether this connector is a tier of the engine's own cache."""
    return transfer is not None and transfer.kv_connector in OFFLOADING_CONNECTORS
