"""`LoRARequest`, under vLLM's name: `vllm/lora/request.py`. The scheduler's floor has it, since
it reads it.
"""

from minivllm.core.lora_request import LoRARequest

__all__ = ["LoRARequest"]
