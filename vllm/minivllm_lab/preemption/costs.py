"""What it costs to take a request's blocks away and bring it back: computed again, or copied to the host. *Modelled*.

    crossover = Crossover.of(known_model("Meta-Llama-3-8B"), get_hardware("H100"), get_link("PCIe 5"), LARGE)
    crossover.recompute, crossover.copy, crossover.ratio      # 32 µs and 2.8 µs for each token, 12 times cheaper

Of T tokens, computing again takes 2 N T / (share of the peak × FLOP/s), and a copy takes T × bytes per token /
bandwidth, and a little for each piece: to first order both grow with T, which cancels. A swap copies twice, out and
back; a host tier, which has stored the blocks before they are missed, copies back only. What is left out: the engine's
other work meanwhile, and attention, which makes computing again dearer the longer a request is. `recompute_seconds` can
count it: for Llama-3-8B 13 % at 8K tokens, 53 % at 32K.

How large the pieces of a copy are decides: vLLM's caches had a place for each layer, keys and values apart, until
v0.11; since v0.12 a block of all layers is one piece (vllm#27743; vLLM blog, 2026-01-08).
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.config import ModelConfig
from minivllm.config.checks import is_number, require
from minivllm.memory import kv_bytes_per_token, num_parameters, serving_dtype
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.kv_links import Link

SHARE_OF_PEAK = 0.5
"""Of a GPU's FLOP/s that a prefill reaches: assumed, as the usual round figure. Our engine's on an H200 reach 0.44 with
512 tokens and 0.63 with 8,192 (benchmarks/results/gpu_engine.nvidia-h200.json)."""
HOST_SHARE = 0.78
"""Of one direction's data-sheet rate that copies to the host reach: 50 of 64 GB/s on PCIe 5 (vLLM blog, 2026-01-08)."""
COPY_SECONDS = 2.3e-6
"""Of issuing one copy, whatever its size: measured on an H20 (taco-project/FlexKV#193)."""
BLOCK_SIZE = 16
"""Tokens of a block: vLLM's default."""


@dataclass(frozen=True)
class Pieces:
    """Into how many copies a block is cut, and what each costs beyond its bytes."""

    name: str
    per_layer: bool
    """Whether each layer's keys, and its values, are a piece of their own."""
    seconds: float = COPY_SECONDS
    """Of issuing one copy. Copies of a stream are taken to follow one another."""

    def __post_init__(self) -> None:
        require(is_number(self.seconds) and self.seconds >= 0, f"seconds is {self.seconds!r}; it must be 0 or more")

    def of_block(self, model: ModelConfig) -> int:
        """Copies that one block takes. A latent is one tensor for each layer; keys and values are two."""
        tensors = 1 if model.kv_lora_rank is not None else 2
        return tensors * model.num_hidden_layers if self.per_layer else 1

    def bytes_of_copy(self, model: ModelConfig, block_size: int = BLOCK_SIZE, tp: int = 1) -> float:
        """Bytes of one copy.

        Raises:
            MinivllmError: a block without tokens.
            UnsupportedModelError: layers that do not keep every token.
        """
        require(block_size >= 1, f"a block has 1 token or more, not {block_size}")
        return block_size * kv_bytes_per_token(model, tp=tp) / self.of_block(model)


SMALL = Pieces("a layer's keys or values of a block", per_layer=True)
LARGE = Pieces("a block of all layers", per_layer=False)


def host_link(gpu: Hardware) -> Link:
    """The way from a GPU to its host and back, at what copies reach of the data sheet's rate.

    Raises:
        MinivllmError: the table has no such rate for it.
    """
    require(gpu.pcie > 0, f"no bandwidth to the host is known for {gpu.name}")
    source = f"{HOST_SHARE:.0%} of one direction of the data sheet's rate; latency assumed"
    return Link(f"host of {gpu.name}", HOST_SHARE * gpu.pcie / 2, 2e-5, source)


def effective_bandwidth(link: Link, num_bytes: float, seconds: float = COPY_SECONDS) -> float:
    """Bytes a second of a long row of copies of so many bytes each, `seconds` of each spent on issuing it."""
    return num_bytes / (seconds + num_bytes / link.bandwidth)


def num_copies(model: ModelConfig, tokens: int, pieces: Pieces, block_size: int = BLOCK_SIZE) -> int:
    """Copies that a request of so many tokens takes in one direction; a last block that is not full counts whole."""
    _check_tokens(tokens)
    return -(-tokens // block_size) * pieces.of_block(model)


def copy_seconds(
    model: ModelConfig, tokens: int, link: Link, pieces: Pieces, block_size: int = BLOCK_SIZE, tp: int = 1
) -> float:
    """Seconds until the blocks of a request of so many tokens are copied, one way. All of a block is copied.

    Raises:
        UnsupportedModelError: layers that do not keep every token.
        MinivllmError: fewer than 0 tokens, or a block without any.
    """
    copies = num_copies(model, tokens, pieces, block_size)
    if not copies:
        return 0.0
    size = pieces.bytes_of_copy(model, block_size, tp)
    return link.latency + copies * size / effective_bandwidth(link, size, pieces.seconds)


def recompute_seconds(
    model: ModelConfig,
    gpu: Hardware,
    tokens: int,
    *,
    share_of_peak: float = SHARE_OF_PEAK,
    tp: int = 1,
    attention: bool = False,
) -> float:
    """Seconds until so many tokens are computed again, alone, in steps so large that arithmetic is the limit.

    2 N operations for each token, and with `attention` 4 × layers × query heads × head size for each pair of a token
    and one before it, or itself.

    Raises:
        MinivllmError: fewer than 0 tokens, a share outside (0, 1], or no units for the model's dtype.
    """
    _check_tokens(tokens)
    require(is_number(share_of_peak) and 0 < share_of_peak <= 1, f"share_of_peak is {share_of_peak!r}; it is in (0, 1]")
    operations = 2.0 * num_parameters(model) * tokens
    if attention:
        per_pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
        operations += per_pair * tokens * (tokens + 1) / 2
    return operations / tp / (share_of_peak * gpu.flops_of(serving_dtype(model)))


def break_even_bandwidth(
    model: ModelConfig, gpu: Hardware, directions: int = 1, *, share_of_peak: float = SHARE_OF_PEAK, tp: int = 1
) -> float:
    """Bytes a second, one way, from which on copying costs less than computing again: bytes per token / its seconds.

    Args:
        model, gpu: what is computed, and where.
        directions: 1 where the host has the blocks already, 2 where they are copied out first.
        share_of_peak, tp: as for `recompute_seconds`.

    Raises:
        MinivllmError: neither 1 nor 2 directions.
    """
    _check_directions(directions)
    each = recompute_seconds(model, gpu, 1, share_of_peak=share_of_peak, tp=tp)
    return directions * kv_bytes_per_token(model, tp=tp) / each


@dataclass(frozen=True)
class Crossover:
    """Seconds for each token of a preempted request, either way, without attention: how long the request is cancels."""

    recompute: float
    copy: float
    """One way."""
    directions: int
    bandwidth: float
    """Bytes a second that copies come to, one way."""
    break_even: float
    """Bytes a second at which both ways cost the same."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        gpu: Hardware,
        link: Link,
        pieces: Pieces,
        directions: int = 1,
        *,
        block_size: int = BLOCK_SIZE,
        share_of_peak: float = SHARE_OF_PEAK,
        tp: int = 1,
    ) -> Crossover:
        """For a model on a GPU with this link to where the blocks are kept. The link's latency is left out.

        Raises:
            UnsupportedModelError: layers that do not keep every token.
            MinivllmError: as `break_even_bandwidth` and `Pieces.bytes_of_copy`.
        """
        least = break_even_bandwidth(model, gpu, directions, share_of_peak=share_of_peak, tp=tp)
        bandwidth = effective_bandwidth(link, pieces.bytes_of_copy(model, block_size, tp), pieces.seconds)
        recompute = recompute_seconds(model, gpu, 1, share_of_peak=share_of_peak, tp=tp)
        return cls(recompute, kv_bytes_per_token(model, tp=tp) / bandwidth, directions, bandwidth, least)

    @property
    def swap(self) -> float:
        """Seconds of copying, all directions together."""
        return self.directions * self.copy

    @property
    def ratio(self) -> float:
        """How many times dearer it is to compute again than to copy."""
        return self.recompute / self.swap

    @property
    def copying_wins(self) -> bool:
        """Whether copying costs less."""
        return self.bandwidth > self.break_even


def _check_tokens(tokens: int) -> None:
    require(isinstance(tokens, int) and tokens >= 0, f"a request has 0 tokens or more, not {tokens!r}")


def _check_directions(directions: int) -> None:
    require(directions in (1, 2), f"directions is {directions!r}; blocks are copied back (1), or out and back (2)")
