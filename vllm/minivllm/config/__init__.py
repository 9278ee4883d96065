"""What a person sets, and what a model's own files say: one frozen dataclass a subject, each checked when it is made.

In vLLM v0.33.0: `vllm/config/`.
"""

from minivllm.config.cache import CacheConfig
from minivllm.config.model import EMBEDDED_DRAFT, EMBEDDED_MODEL, ModelConfig
from minivllm.config.scheduler import SchedulerConfig
from minivllm.config.speculative import SpeculativeConfig

__all__ = [
    "EMBEDDED_DRAFT",
    "EMBEDDED_MODEL",
    "CacheConfig",
    "ModelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
]
