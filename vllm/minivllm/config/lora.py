"""Settings of LoRA adapters. In vLLM v0.33.0: `vllm/config/lora.py` (`LoRAConfig`)."""

from dataclasses import dataclass

from minivllm.config.checks import is_count, require, require_choice, require_counts

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Limits on how many adapters an engine serves at once, and how large they may be.

    - `max_loras`: slots on the device: the maximum adapters in one step. Each has room for
      `max_lora_rank` in every linear inside the layers, whatever is loaded into it.
    - `max_lora_rank`: the largest rank, one of `MAX_LORA_RANKS`.
    - `max_cpu_loras`: adapters kept in host memory, least recently used ones forgotten first; None:
      `max_loras`.
    - `lora_dtype`: dtype of the adapters' weights; "auto" is the model's.
    """

    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"

    def __post_init__(self) -> None:
        require_counts(self, 1, "max_loras")
        require_counts(self, 1, "max_cpu_loras", may_be_none=True)
        require(
            # `is_count` too, since True equals 1 and is in the list.
            self.max_lora_rank in MAX_LORA_RANKS and is_count(self.max_lora_rank, 1),
            f"max_lora_rank is {self.max_lora_rank!r}; it must be one of {', '.join(map(str, MAX_LORA_RANKS))}",
        )
        require(
            self.capacity >= self.max_loras,
            f"max_cpu_loras is {self.max_cpu_loras}, and max_loras is {self.max_loras}: what is in a slot is in host "
            "memory too, so max_cpu_loras must be at least max_loras",
        )
        require_choice("lora_dtype", self.lora_dtype, LORA_DTYPES)

    @property
    def capacity(self) -> int:
        """The maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
