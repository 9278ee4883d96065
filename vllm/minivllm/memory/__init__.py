"""Device memory, accounted for: bytes per token, tokens that fit, the start-up ledger. No torch."""

from minivllm.memory.bytes_per_token import (
    cache_dtype,
    kv_bytes_per_token,
    kv_cache_tokens,
    max_concurrency,
    serving_dtype,
)
from minivllm.memory.devices import Device, get_device
from minivllm.memory.kv_layers import KVGroups, kv_groups
from minivllm.memory.ledger import LedgerRow, MemoryLedger, estimated_activation_peak, memory_ledger
from minivllm.memory.parameters import (
    num_parameters,
    parameter_groups,
    rotary_table_bytes,
    routed_parameters,
    weight_bytes,
)

__all__ = [
    "Device",
    "KVGroups",
    "LedgerRow",
    "MemoryLedger",
    "cache_dtype",
    "estimated_activation_peak",
    "get_device",
    "kv_bytes_per_token",
    "kv_cache_tokens",
    "kv_groups",
    "max_concurrency",
    "memory_ledger",
    "num_parameters",
    "parameter_groups",
    "rotary_table_bytes",
    "routed_parameters",
    "serving_dtype",
    "weight_bytes",
]
