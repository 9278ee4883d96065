"""Published measurements that several of the model's checks use, none of which calibrates it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from minivllm.config import ModelConfig
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import SERVING, LeverCost

SPLITWISE = "Splitwise, table IV: Llama-70B, 8 GPUs, one request at a time, medians; vLLM of 2023, without CUDA graphs"
SPLITWISE_FIRST_TOKENS = {
    ("coding", 1500): {"A100-80": 0.185, "H100": 0.095},
    ("conversation", 1020): {"A100-80": 0.155, "H100": 0.084},
}
"""Seconds to the first token, by trace, its median tokens in, and GPU."""
SARATHI_STEP, SARATHI_DECODES = 1024, 32
"""Tokens of a full step, and how many of them are taken to be decodes."""
SARATHI = {"chats": (1730, 0.14), "papers to summarize": (7059, 0.17)}
"""Sarathi-Serve, table 4: Yi-34B on two A100, 1,024 tokens a step, 128 requests: the median prompt,
and the 99th percentile of the time between tokens in seconds.
"""
YI = {
    "model_type": "llama", "vocab_size": 64000, "hidden_size": 7168, "intermediate_size": 20480,
    "num_hidden_layers": 60, "num_attention_heads": 56, "num_key_value_heads": 8, "dtype": "bfloat16",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class PublishedCheck:
    """A published figure and the model's figure: a rate, a time, or a ratio of two of them."""

    what: str
    source: str
    measured: float
    modelled: float
    kind: str = field(default="decode", kw_only=True)

    @property
    def error(self) -> float:
        """The relative error, (modelled − measured) / measured."""
        return self.modelled / self.measured - 1


def sarathi_step(context: int) -> float:
    """Return the seconds of SARATHI's full step: a chunk, and decodes that all have this context."""
    cost = RooflineCost.of(ModelConfig.from_dict(YI), get_hardware("A100-80"), tp=2)
    decodes = [(1, context)] * SARATHI_DECODES
    return cost.seconds(StepShape.of([(SARATHI_STEP - SARATHI_DECODES, context), *decodes]))


def splitwise_cost(gpu: str) -> LeverCost:
    """Return the cost of SPLITWISE's engine: a 70B model on eight GPUs, with every kernel launched
    by the host.
    """
    levers = replace(SERVING, tensor_parallel=8, cuda_graphs=False)
    return LeverCost.of(levers, known_model("Meta-Llama-3-70B"), get_hardware(gpu))
