"""The size of a LoRA adapter: its parameters and its bytes.

An adapter of rank r replaces W [out, in] by W + scale * B A, with A [r, in] and B [out, r]: r * (in
+ out) numbers for each linear that it changes (arXiv 2106.09685).
"""

from collections.abc import Sequence

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm.memory.adapters import ALL_LINEARS, linear_shapes
from minivllm.memory.bytes_per_token import DTYPE_BYTES


def adapter_parameters(config: ModelConfig, rank: int, targets: Sequence[str] = ALL_LINEARS) -> int:
    """Return the number of parameters of an adapter: layers * rank * sum(in + out) over its
    targets.

    Raises:
        MinivllmError: a target that is not a linear layer of the model, a rank below 1, or a model that is not
            counted here.
    """
    require(rank >= 1, f"an adapter's rank must be at least 1, not {rank}")
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
