"""Settings of LoRA adapters. In vLLM v0.33.0: `vllm/config/lora.py` (`LoRAConfig`)."""

from dataclasses import dataclass
from typing import Annotated

from minivllm.config.checks import Count, Rule, check_fields, is_count, one_of, require

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# `is_count` first, since True equals 1 and a list has no hash.
RANK = Rule(
    lambda value: is_count(value, 1) and value in MAX_LORA_RANKS,
    f"one of {', '.join(map(str, MAX_LORA_RANKS))}",
)


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

    max_loras: Count = 1
    max_lora_rank: Annotated[int, RANK] = 16
    max_cpu_loras: Count | None = None
    lora_dtype: Annotated[str, one_of("auto", "float32", "float16", "bfloat16")] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.capacity >= self.max_loras,
            f"max_cpu_loras is {self.max_cpu_loras}, and max_loras is {self.max_loras}: what is in a slot is in host "
            "memory too, so max_cpu_loras must be at least max_loras",
        )

    @property
    def capacity(self) -> int:
        """The maximum number of adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras
