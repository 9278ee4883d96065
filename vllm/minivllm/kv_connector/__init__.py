"""Connectors: keys and values to and from other engines, or a store. In vLLM: `vllm/distributed/kv_transfer/`."""
