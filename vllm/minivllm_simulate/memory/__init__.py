"""The memory of models that the engine need not be able to run, on GPUs that need not be here: what
`minivllm.memory` is told there is counted here. No torch.
"""

from minivllm_simulate.memory.adapters import adapter_bytes, adapter_parameters
from minivllm_simulate.memory.kv_layers import StateLayer, WindowLayer, kv_groups
from minivllm_simulate.memory.ledger import memory_ledger
from minivllm_simulate.memory.parameters import (
    num_parameters,
    parameter_groups,
    rotary_table_bytes,
    routed_parameters,
    weight_bytes,
)

__all__ = [
    "StateLayer", "WindowLayer", "adapter_bytes", "adapter_parameters", "kv_groups", "memory_ledger",
    "num_parameters", "parameter_groups", "rotary_table_bytes", "routed_parameters", "weight_bytes",
]  # fmt: skip
