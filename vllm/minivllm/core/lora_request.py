"""The LoRA adapter of a request. In vLLM v0.33.0: `vllm/lora/request.py` (`LoRARequest`)."""

from dataclasses import dataclass

from minivllm.config.checks import encodable, is_count
from minivllm.errors import MinivllmError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, its id (1 or more; 0 means the base model) and the folder that it is
    loaded from.

    - `base_model_name`: the model that it was trained for, if that is known; the list of models
      shows it.
    - `load_inplace`: load the folder again if the id is known already.
    - `fingerprint`: identifies the folder's contents; the core sets it. A rank that reads the
      folder again refuses anything else, and block hashes include it, so that a rewritten folder
      does not find the old one's cached blocks. Not in vLLM.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, value in (("lora_name", self.lora_name), ("lora_path", self.lora_path)):
            if not isinstance(value, str) or not value:
                raise MinivllmError(f"{name} is {value!r}; it must be a non-empty string")
            encodable(value, name)
        if not is_count(self.lora_int_id, 1):
            raise MinivllmError(f"lora_int_id is {self.lora_int_id!r}; adapters are numbered from 1")
