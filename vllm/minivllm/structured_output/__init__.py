"""Structured outputs: grammars that say which tokens may come next. No torch.

In vLLM v0.33.0: `vllm/v1/structured_output/`.
"""
