"""Siblings of a model with other numbers of KV heads, and the share of them that each of several
GPUs keeps and computes. *Modelled*.

    sibling = with_kv_heads(known_model("Llama-3.1-8B"), 1)
    share = ModelShare(sibling, get_hardware("H100"), tp=16)
    share.bytes_per_token, share.copies, share.intensity, share.fits(32_768)

`minivllm.memory` counts memory as vLLM does at its start; `levers` models a step's time. Links
between all GPUs are assumed to be as fast as within a machine. The siblings are shapes without
weights; their quality is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.memory import MemoryLedger, kv_bytes_per_token
from minivllm.memory.bytes_per_token import kv_heads_on_rank
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.layouts import BLOCK_SIZE, TOKEN_BUDGET, UTILIZATION
from minivllm_simulate.levers import SERVING, LeverCost
from minivllm_simulate.memory import memory_ledger

ROPE = 64
"""Numbers of the rotary key beside a latent, as in DeepSeek-V2."""


def with_kv_heads(model: ModelConfig, heads: int) -> ModelConfig:
    """Return the model with `heads` KV heads.

    Raises:
        MinivllmError: the query heads cannot share them equally.
    """
    many = model.num_attention_heads
    require(heads >= 1 and many % heads == 0, f"{many} query heads cannot share {heads} KV heads equally")
    return replace(model, num_key_value_heads=heads)


def with_latent(model: ModelConfig, width: int) -> ModelConfig:
    """Return the model with DeepSeek-V2's attention: each layer caches a latent of `width` numbers
    and `ROPE` more.
    """
    return replace(
        model,
        model_type="deepseek_v2",
        num_key_value_heads=model.num_attention_heads,
        kv_lora_rank=width,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=model.head_dim,
        v_head_dim=model.head_dim,
    )


def decode_flops_per_key(model: ModelConfig, tp: int = 1) -> float:
    """Count one GPU's operations per cached token, over all layers, when one token is decoded.

    A latent is used in the absorbed form: scores over latent and rotary key, then the weighted sum
    of latents.
    """
    per_head = 4 * model.head_dim
    if model.kv_lora_rank is not None:
        per_head = 2 * (model.latent_width + model.kv_lora_rank)
    return model.num_hidden_layers * model.num_attention_heads / tp * per_head


def decode_intensity(model: ModelConfig) -> float:
    """Return attention's operations in a decode step per byte of a 16-bit cache, on one GPU."""
    return decode_flops_per_key(model) / kv_bytes_per_token(model, "bfloat16")


def kv_heads_of_rank(rank: int, tp: int, num_kv_heads: int) -> list[int]:
    """Return the KV heads that a rank keeps; with more ranks than heads, neighbours keep the same
    one.

    In vLLM v0.33.0: `vllm/model_executor/layers/linear.py` (`QKVParallelLinear`).
    """
    first = rank * num_kv_heads // tp
    return list(range(first, max(first + 1, (rank + 1) * num_kv_heads // tp)))


@dataclass(frozen=True)
class ModelShare:
    """The part of a model on one of `tp` equal GPUs; `kv_heads` overrides the KV heads that
    vLLM's rule gives it.
    """

    model: ModelConfig
    gpu: Hardware
    tp: int
    kv_heads: int | None = None

    @property
    def holders(self) -> int:
        """The maximum number of parts that keys and values can be divided into: the KV heads, or
        one for a latent.
        """
        return 1 if self.model.kv_lora_rank is not None else self.model.num_key_value_heads

    @property
    def copies(self) -> int:
        """The number of GPUs that keep the same keys and values."""
        return max(1, self.tp // self.holders)

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values per token on this GPU, over all layers."""
        counted = kv_bytes_per_token(self.model, "bfloat16", self.tp)
        if self.kv_heads is None or self.model.kv_lora_rank is not None:
            return counted
        return counted // kv_heads_on_rank(self.model, self.tp) * self.kv_heads

    @property
    def intensity(self) -> float:
        """Attention operations of a decode step per byte of the cache."""
        return decode_flops_per_key(self.model, self.tp) / self.bytes_per_token

    @cached_property
    def ledger(self) -> MemoryLedger:
        """The use of this GPU's memory.

        Raises:
            MinivllmError: nothing is left for keys and values, or the query heads cannot be
                divided.
        """
        return memory_ledger(
            self.model, self.gpu, max_model_len=1, tp=self.tp, gpu_memory_utilization=UTILIZATION,
            max_num_batched_tokens=TOKEN_BUDGET, block_size=BLOCK_SIZE, check=False,
        )  # fmt: skip

    def fits(self, context: int) -> float:
        """Return how many requests of `context` tokens fit on this GPU, and therefore on all of
        them.

        Raises:
            MinivllmError: see `ledger`.
        """
        blocks = max(0, self.ledger.kv_bytes // (self.bytes_per_token * BLOCK_SIZE) - 1)
        return blocks * BLOCK_SIZE / context

    @cached_property
    def cost(self) -> LeverCost:
        """The cost of a decode step."""
        cost = LeverCost.of(replace(SERVING, tensor_parallel=self.tp), self.model, self.gpu)
        pairs = decode_flops_per_key(self.model, self.tp)
        return replace(
            cost, roofline=replace(cost.roofline, kv_bytes_per_token=self.bytes_per_token, flops_per_pair=pairs)
        )

    def tokens_per_second(self, batch: int, context: int) -> float:
        """Return the throughput of all GPUs together when `batch` requests of `context` tokens
        decode; 0 without requests.
        """
        return batch / self.cost.seconds(StepShape.of([(1, context - 1)] * batch)) if batch else 0.0
