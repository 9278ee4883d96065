"""The LoRA adapter of a request. In vLLM v0.33.0: `vllm/lora/request.py` (`LoRARequest`)."""

from dataclasses import dataclass

from minivllm.errors import MinivllmError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, its id (1 or more; 0 means the base model) and the folder that it is loaded from."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise MinivllmError(f"lora_int_id is {self.lora_int_id}; adapters are numbered from 1")
