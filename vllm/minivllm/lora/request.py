"""`LoRARequest`, at vLLM's path: `vllm/lora/request.py`. It is defined in `core`, because the
scheduler reads it.
"""

from minivllm.core.lora_request import LoRARequest

__all__ = ["LoRARequest"]
