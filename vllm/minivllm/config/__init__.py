"""User settings, and the model's own config: one frozen dataclass per subject, checked when it is
created.

In vLLM v0.33.0: `vllm/config/`.
"""

# ruff: noqa: F401  (these names are here for others to import)
from minivllm.config.cache import CacheConfig
from minivllm.config.kv_transfer import KVTransferConfig
from minivllm.config.lora import LoRAConfig
from minivllm.config.model import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_MODEL, EMBEDDED_SIBLINGS, ModelConfig
from minivllm.config.parts import NO_PARTS, Parts
from minivllm.config.scheduler import SchedulerConfig
from minivllm.config.speculative import DraftingConfig, SpeculativeConfig
from minivllm.config.structured_outputs import StructuredOutputsParams
