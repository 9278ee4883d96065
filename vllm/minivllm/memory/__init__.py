"""Device memory, accounted for: bytes per token, tokens that fit, the start-up ledger. No torch."""

# ruff: noqa: F401  (these names are here for others to import)
from minivllm.memory.bytes_per_token import (
    cache_dtype,
    kv_bytes_per_token,
    kv_cache_tokens,
    max_concurrency,
    serving_dtype,
)
from minivllm.memory.kv_layers import KVGroups
from minivllm.memory.ledger import Device, LedgerRow, MemoryLedger, estimated_activation_peak, memory_ledger
