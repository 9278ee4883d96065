"""Settings of the KV-cache block pool. No torch.

In vLLM v0.33.0: `vllm/config/cache.py` (`CacheConfig`).
"""

from dataclasses import dataclass

from minivllm.config.checks import is_count, require, require_flags

KV_CACHE_DTYPES = {
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
"""What the engine can store keys and values as besides the model's own dtype ("auto"): torch's
name of the dtype.
"""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool: `num_gpu_blocks` blocks of `block_size` tokens, including the null block.

    - `enable_prefix_caching`: keep the blocks that were computed, and reuse them for prompts that
      begin with the same tokens.
    """

    num_gpu_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        require(is_count(self.block_size, 1), f"block_size is {self.block_size!r}; it must be at least 1 token")
        require(
            is_count(self.num_gpu_blocks, 2),
            f"num_gpu_blocks is {self.num_gpu_blocks!r}; at least 2 are needed, since block 0 is the null block",
        )
        require_flags(self, "enable_prefix_caching")
