"""The LoRA adapter of a request. In vLLM v0.33.0: `vllm/lora/request.py` (`LoRARequest`).

`minivllm.lora.request` hands it on under vLLM's name.
"""

from dataclasses import dataclass

from minivllm.config.checks import is_count
from minivllm.errors import MinivllmError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, its id (1 or more; 0 means the base model) and the folder that it is loaded from.

    - `base_model_name`: the model that it was trained for, if anybody says so; a list of models shows it.
    - `load_inplace`: load the folder again if the id is known already.
    - `generation`: how often another adapter has had the same name and path before, such as one whose folder was
      written anew: their keys and values differ, so their cached blocks must. Not in vLLM.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    generation: int = 0

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise MinivllmError(f"{name} is {value!r}; it must be a text")
        if not is_count(self.lora_int_id, 1):
            raise MinivllmError(f"lora_int_id is {self.lora_int_id!r}; adapters are numbered from 1")

    @property
    def name(self) -> str:
        """As `lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """As `lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """As `lora_int_id`."""
        return self.lora_int_id
