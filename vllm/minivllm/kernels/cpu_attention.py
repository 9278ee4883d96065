"""The attention of the engine on a CPU."""

from __future__ import annotations

from minivllm.kernels.torch_attention import gather_attention as unified_attention_cpu

__all__ = ["unified_attention_cpu"]
