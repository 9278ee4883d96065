"""Settings of the KV-cache block pool. No torch.

In vLLM v0.33.0: `vllm/config/cache.py` (`CacheConfig`).
"""

from dataclasses import dataclass
from typing import Annotated

from minivllm.config.checks import Count, Rule, check_fields, is_count

POOL_SIZE = Rule(lambda value: is_count(value, 2), "at least 2, since block 0 is the null block")
KV_CACHE_DTYPES = {
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
"""What the engine can store keys and values as besides the model's own dtype ("auto"): torch's
name of the dtype.
"""


def kv_cache_layout(device: str) -> str:
    """Return the order of a block's dimensions in memory on "cpu" or "cuda", as vLLM names it:
    heads before slots ("HND") on a CPU, slots before heads ("NHD") on a GPU.
    """
    return "HND" if device == "cpu" else "NHD"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool: `num_gpu_blocks` blocks of `block_size` tokens, including the null block.

    - `enable_prefix_caching`: keep the blocks that were computed, and reuse them for prompts that
      begin with the same tokens.
    """

    num_gpu_blocks: Annotated[int, POOL_SIZE]
    block_size: Count = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
