"""Model what it costs to bring a preempted request back: recompute it, or copy its blocks to the
host and back.

    crossover = Crossover.of(known_model("Meta-Llama-3-8B"), get_hardware("H100"), get_link("PCIe 5"), LARGE)
    crossover.recompute, crossover.copy      # 32 µs and 2.8 µs for each token

Recomputing T tokens takes 2 N T / (share of the peak × FLOP/s). A copy takes T × bytes per token /
bandwidth, plus a little time for each piece. To first order both grow with T, which cancels. A swap
copies twice, out and back; a host tier, which has stored the blocks beforehand, only copies back.
The model leaves out the engine's other work at the same time. It also leaves out attention, which
makes recomputing more expensive the longer a request is; `recompute_seconds` can count it.

The size of the pieces is decisive. Until v0.11, vLLM's caches kept each layer's keys and values
apart; since v0.12 a block of all layers is one piece (vllm#27743; vLLM blog, 2026-01-08).
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.config import ModelConfig
from minivllm.memory import kv_bytes_per_token, serving_dtype
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.kv_links import Link
from minivllm_simulate.memory import num_parameters

SHARE_OF_PEAK = 0.5
"""The share of a GPU's FLOP/s that a prefill reaches: assumed, the usual round figure. Our engine's
prefill on an H200 reaches 0.44 with 512 tokens and 0.63 with 8,192
(benchmarks/results/gpu_engine.nvidia-h200.json).
"""
COPY_SECONDS = 2.3e-6
"""The time to issue one copy of any size: measured on an H20 (taco-project/FlexKV#193)."""
BLOCK_SIZE = 16
"""Tokens of a block: vLLM's default."""


class Pieces(NamedTuple):
    """The copies that a block is cut into, and the cost of each beyond its bytes."""

    name: str
    per_layer: bool
    """Whether each layer's keys, and its values, are a piece of their own."""
    seconds: float = COPY_SECONDS
    """The time to issue one copy. The copies of a stream follow one another."""

    def of_block(self, model: ModelConfig) -> int:
        """Return how many copies a block takes: one per layer for a latent, two per layer for keys
        and values.
        """
        tensors = 1 if model.kv_lora_rank is not None else 2
        return tensors * model.num_hidden_layers if self.per_layer else 1

    def bytes_of_copy(self, model: ModelConfig, block_size: int = BLOCK_SIZE) -> float:
        """Return the bytes of one copy.

        Raises:
            UnsupportedModelError: layers that do not keep every token.
        """
        return block_size * kv_bytes_per_token(model) / self.of_block(model)


SMALL = Pieces("a layer's keys or values of a block", per_layer=True)
LARGE = Pieces("a block of all layers", per_layer=False)


def effective_bandwidth(link: Link, num_bytes: float, seconds: float = COPY_SECONDS) -> float:
    """Return the bytes per second of a series of copies of `num_bytes`, each of which takes
    `seconds` to issue.
    """
    return num_bytes / (seconds + num_bytes / link.bandwidth)


def recompute_seconds(model: ModelConfig, gpu: Hardware, tokens: int, *, attention: bool = False) -> float:
    """Return the time to recompute the first `tokens` tokens of a request in compute-bound steps.

    A token takes 2 N operations. With `attention`, each pair of a token and an earlier one (or
    itself) takes another 4 × layers × query heads × head size.

    Raises:
        MinivllmError: no units for the model's dtype.
    """
    operations = 2.0 * num_parameters(model) * tokens
    if attention:
        per_pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
        operations += per_pair * tokens * (tokens + 1) / 2
    return operations / (SHARE_OF_PEAK * gpu.flops_of(serving_dtype(model)))


def break_even_bandwidth(model: ModelConfig, gpu: Hardware, directions: int = 1) -> float:
    """Return the bandwidth, in bytes per second one way, above which copying is cheaper than
    recomputing.

    Args:
        directions: 1 where the host has the blocks already, 2 where they are copied out first.
    """
    return directions * kv_bytes_per_token(model) / recompute_seconds(model, gpu, 1)


class Crossover(NamedTuple):
    """The seconds that recomputing and copying take per token of a preempted request; without
    attention, the request's length cancels.
    """

    recompute: float
    copy: float
    """One way."""
    directions: int
    bandwidth: float
    """Bytes a second that copies reach, one way."""
    break_even: float
    """Bytes a second at which both ways cost the same."""

    @classmethod
    def of(
        cls, model: ModelConfig, gpu: Hardware, link: Link, pieces: Pieces, directions: int = 1,
        block_size: int = BLOCK_SIZE,
    ) -> Crossover:  # fmt: skip
        """Compare recomputing and copying for a model on a GPU with this link to the host, ignoring
        the link's latency.

        Raises:
            UnsupportedModelError: layers that do not keep every token.
        """
        bandwidth = effective_bandwidth(link, pieces.bytes_of_copy(model, block_size), pieces.seconds)
        return cls(
            recompute_seconds(model, gpu, 1), kv_bytes_per_token(model) / bandwidth, directions, bandwidth,
            break_even_bandwidth(model, gpu, directions),
        )  # fmt: skip

    @property
    def swap(self) -> float:
        """Seconds per token for the copies in all directions."""
        return self.directions * self.copy

    @property
    def copying_wins(self) -> bool:
        """Return whether copying is cheaper than recomputing."""
        return self.bandwidth > self.break_even
