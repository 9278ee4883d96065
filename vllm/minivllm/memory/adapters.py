"""The size of a LoRA adapter: the linears it changes, its parameters, its bytes.

An adapter of rank r replaces W [out, in] by W + scale * B A, with A [r, in] and B [out, r]: r * (in
+ out) numbers for each linear that it changes (arXiv 2106.09685).
"""

from collections.abc import Sequence

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.memory.bytes_per_token import DTYPE_BYTES

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
ALL_LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each linear in one layer of the Llama family, by the name that adapters
    use.
    """
    if config.kv_lora_rank is not None or config.num_experts:
        raise MinivllmError(f"adapters are counted for dense models with ordinary attention, not {config.model_type!r}")
    config.require("hidden_size", "intermediate_size")
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (mlp, hidden),
        "up_proj": (mlp, hidden),
        "down_proj": (hidden, mlp),
    }


def adapter_parameters(config: ModelConfig, rank: int, targets: Sequence[str] = ALL_LINEARS) -> int:
    """Return the number of parameters of an adapter: layers * rank * sum(in + out) over its
    targets.

    Raises:
        MinivllmError: a target that is not a linear layer of the model, a rank below 1, or a model that is not
            counted here.
    """
    if rank < 1:
        raise MinivllmError(f"an adapter's rank must be at least 1, not {rank}")
    shapes = linear_shapes(config)
    unknown = [name for name in targets if name not in shapes]
    if unknown:
        raise MinivllmError(f"{unknown[0]!r} is not a linear layer of the model; known: {', '.join(shapes)}")
    # A is [rank, in], B is [out, rank]
    return config.num_hidden_layers * rank * sum(sum(shapes[name]) for name in targets)


def adapter_bytes(config: ModelConfig, rank: int, targets: Sequence[str] = ALL_LINEARS, dtype: str = "bfloat16") -> int:
    """Return the size of an adapter's A and B in bytes. A slot always has room for `max_lora_rank`,
    whatever the rank of its adapter.
    """
    return adapter_parameters(config, rank, targets) * DTYPE_BYTES[dtype]
