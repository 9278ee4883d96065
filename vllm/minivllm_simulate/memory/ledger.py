"""The ledger of any model on any of the known GPUs: what is not measured is counted or estimated."""

from typing import Any

from minivllm.memory import Device, MemoryLedger
from minivllm.memory import ledger as engine
from minivllm.memory.bytes_per_token import Model, as_config
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.memory.kv_layers import kv_groups
from minivllm_simulate.memory.parameters import rotary_table_bytes, weight_bytes

# GPUs on which FlashInfer's kernel for gated delta nets is the default.
GDN_CHECKPOINT_GPUS = ("H100", "H200", "B200")


def memory_ledger(
    model: Model, device: Device | str, *, max_model_len: int | None = None, tp: int = 1, kv_dtype: str = "auto",
    weight_dtype: str = "auto", block_size: int = 16, max_num_batched_tokens: int = 8192, weights: int | None = None,
    **further: Any,
) -> MemoryLedger:  # fmt: skip
    """Divide up the memory of one GPU like vLLM at start-up, for any model whose parts are known.

    Args:
        model: a ModelConfig or the contents of a `config.json`.
        device: a device, or the name of a GPU listed in `hardware`.
        max_model_len: the longest request, prompt plus output; None: the model's own limit.
        weight_dtype: see `weight_bytes`.
        weights: bytes, if known from a start-up log; if not, they are counted.
        tp, kv_dtype, block_size, max_num_batched_tokens, further: as for `minivllm.memory.memory_ledger`; the
            weights of a `drafter` are not counted, give `drafter_bytes`.

    Raises:
        MinivllmError: as `minivllm.memory.memory_ledger`, or the GPU is unknown.
        UnsupportedModelError: the memory of this model cannot be counted.
    """
    config = as_config(model)
    gpu = device if isinstance(device, Device) else get_hardware(device)
    device = Device(gpu.name, gpu.memory_bytes)
    if max_model_len is None:
        config.require("max_position_embeddings")
        max_model_len = config.max_position_embeddings
    kv = kv_groups(
        config, kv_dtype, tp, block_size, max_num_batched_tokens, gdn_checkpoints=device.name in GDN_CHECKPOINT_GPUS
    )
    if weights is None:
        weights = weight_bytes(config, weight_dtype, tp) + rotary_table_bytes(config)
    return engine.memory_ledger(
        config, device, weights=weights, max_model_len=max_model_len, tp=tp, kv_dtype=kv_dtype, block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens, kv=kv, **further,
    )  # fmt: skip
