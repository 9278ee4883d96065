"""`LoRARequest` at vLLM's path, for scripts that are moved from vLLM. It is defined in `core`, because
the scheduler reads it.

In vLLM v0.33.0: `vllm/lora/request.py`.
"""

from minivllm.core.lora_request import LoRARequest

__all__ = ["LoRARequest"]
