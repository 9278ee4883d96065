"""LoRA adapters: read from PEFT folders, kept in host memory, applied from slots on the device. In vLLM: `vllm/lora/`."""
