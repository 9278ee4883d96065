"""The linears that a LoRA adapter may change, and their shapes."""

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
ALL_LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (out, in) of each linear in one layer of the Llama family, by the name that adapters
    use.
    """
    if config.kv_lora_rank is not None or config.num_experts:
        raise MinivllmError(f"adapters work with dense models of ordinary attention, not with {config.model_type!r}")
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
