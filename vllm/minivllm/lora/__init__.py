"""LoRA adapters: read from PEFT folders, kept in host memory, applied from slots on the device.

In vLLM v0.33.0: `vllm/lora/`.
"""
