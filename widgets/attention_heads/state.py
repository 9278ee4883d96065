"""Compute the state of lesson 09's widget: the memory that keys and values take as the number of
GPUs grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from minivllm.config import ModelConfig
from minivllm.config.checks import is_count, require
from minivllm.errors import MinivllmError
from minivllm_lab.attention_heads.siblings import (
    ModelShare,
    decode_intensity,
    kv_heads_of_rank,
    with_kv_heads,
    with_latent,
)
from minivllm_lab.checks.bounded import bounded
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import UTILIZATION

MODELS = ("Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-32B", "Mixtral-8x7B-v0.1", "Llama-3.1-70B")
"""Models whose query heads can be split by any power of two."""
MHA, MLA = "Llama-2-7b-hf", "DeepSeek-V3"
"""Published models, for comparison: one with a KV head for each query head, and one with a latent."""
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
TPS = (1, 2, 4, 8, 16, 32, 64)
KV_HEADS = (1, 2, 4, 8, 16, 32, 64)
LATENTS = (0, 128, 256, 512, 1024)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
WANTED = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WORTH = 1.25
"""The least ratio of requests that is worth doubling the GPUs; below it, they are spent on
copies.
"""
PLENTY = 2**50
"""Bytes of memory in which any model fits."""
PATIENCE = 1.0
"""CPU seconds that the reader's rule may take."""
START = {
    "tensor_parallel_size": 16, "kv_heads": 8, "latent": 0, "context": 32768, "wanted": 32,
    "model": "Llama-3.1-70B", "gpu": "H100",
}  # fmt: skip
HeadsOfRank = Callable[[int, int, int], Any]
"""`kv_heads_of_rank(rank, tp, num_kv_heads)`, as in exercise 09."""


@dataclass(frozen=True)
class Place:
    """One kind of attention on one number of GPUs."""

    tp: int
    kv_bytes: int
    """Bytes of a token on each GPU, all layers; 0 where the heads cannot be split this way."""
    copies: int
    """How many GPUs keep the same keys and values."""
    intensity: float
    """Operations of a decode's attention per byte of the cache."""
    fits: float
    """Requests of this context that fit; 0 where even the weights do not."""
    tokens_per_second: float
    """The rate when as many requests decode as are required, or fit."""
    refused: str
    """Why nothing fits, or ""."""
    divisible: bool
    """Whether the query heads can be split this way."""


@dataclass(frozen=True)
class Kind:
    """One way of sharing KV heads, on every number of GPUs."""

    name: str
    places: tuple[Place, ...]

    def at(self, tp: int) -> Place:
        return next(place for place in self.places if place.tp == tp)

    def gain(self, tp: int) -> float:
        """Return how many times as many requests fit as on half the GPUs; inf if none fit there."""
        before = next((place.fits for place in self.places if place.tp * 2 == tp), 0.0)
        return self.at(tp).fits / before if before else float("inf")


@dataclass(frozen=True)
class Use:
    """The attention of one GPU, and how often it uses each byte of the cache that it reads."""

    name: str
    query_heads: int
    kv_heads: int
    latent: int
    """The width of the latent, or 0 for KV heads."""
    operations: float
    yours: bool = False


@dataclass(frozen=True)
class State:
    """The reader's kind of attention, and the published model's for comparison."""

    tp: int
    model: str
    hardware: Hardware
    longest: int
    """The most tokens that the model supports."""
    query_heads: int
    kv_heads: int
    """The KV heads, at most as many as there are query heads."""
    latent: int
    """The width of the latent, or 0 for KV heads."""
    context: int
    wanted: int
    """Requests of this context that must fit."""
    reserved: int
    """Bytes that each GPU needs besides the KV cache; 0 where the heads cannot be split."""
    mine: Kind
    published: Kind
    ranks: tuple[tuple[int, ...], ...]
    """The KV heads of each GPU, by the reader's rule if there is one."""
    wrong: str
    """How the reader's rule breaks the attention of a rank, or ""."""

    @property
    def here(self) -> Place:
        return self.mine.at(self.tp)

    @property
    def uses(self) -> list[Use]:
        """Return what published models, the reader's among them, and the reader's own make of a byte."""
        heads, kept = self.query_heads // self.tp, max(map(len, self.ranks))
        name = f"1 of your {self.tp} GPUs" if self.tp > 1 else "your GPU"
        own = Use(name, heads, kept, self.latent, self.here.intensity, yours=True)
        return [published(MHA), published(self.model), *[own] * self.here.divisible, published(MLA)]

    @property
    def shares(self) -> tuple[float, float]:
        """Return the part of each GPU's usable memory that the weights take, and that with all requests."""
        usable, kv = self.hardware.memory_bytes * UTILIZATION, self.wanted * self.context * self.here.kv_bytes
        return self.reserved / usable, (self.reserved + kv) / usable

    def cause(self, tp: int) -> str:
        """Return what is wrong on this many GPUs: "long", "heads", "weights", "few", "copies" or
        "".
        """
        place = self.mine.at(tp)
        if self.context > self.longest:
            return "long"
        if not place.divisible:
            return "heads"
        if place.refused:
            return "weights"
        if int(place.fits) < self.wanted:
            return "few"
        return "copies" if place.copies > 1 and self.mine.gain(tp) < WORTH else ""


def sweep(
    tensor_parallel_size: int = START["tensor_parallel_size"],
    kv_heads: int = START["kv_heads"],
    latent: int = START["latent"],
    context: int = START["context"],
    wanted: int = START["wanted"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    kv_heads_of_rank: HeadsOfRank | None = None,
) -> State:
    """Lay out a model's attention over 1 to 64 GPUs.

    Args:
        tensor_parallel_size: The number of GPUs, at the handle.
        kv_heads: KV heads, at most one per query head.
        latent: Width of a latent that replaces KV heads; 0 is none.
        context: Tokens in each request.
        wanted: Requests that must fit.
        model, gpu: Names in `known_models` and `hardware`.
        kv_heads_of_rank: The reader's function of exercise 09.

    Raises:
        MinivllmError: The reader's rule returns no KV heads.
    """
    whole = known_model(model)
    heads = whole.num_attention_heads
    shared = min(kv_heads, heads)
    holders = 1 if latent else shared
    ranks, wrong = _ranks(tensor_parallel_size, holders, None if latent else kv_heads_of_rank)
    kept = max(map(len, ranks)) if kv_heads_of_rank and not latent else None
    setting = model, gpu, context, wanted
    mine = _kind(*setting, 0 if latent else shared, latent, tensor_parallel_size, kept)
    return State(
        tp=tensor_parallel_size,
        model=model,
        hardware=get_hardware(gpu),
        longest=whole.max_position_embeddings,
        query_heads=heads,
        kv_heads=shared,
        latent=latent,
        context=context,
        wanted=wanted,
        reserved=_reserved(model, gpu, 0 if latent else shared, latent, tensor_parallel_size),
        mine=mine,
        published=_kind(*setting, whole.num_key_value_heads, 0),
        ranks=ranks,
        wrong=wrong,
    )


@lru_cache(maxsize=16)
def published(name: str) -> Use:
    """Return what a published model makes of each byte on one GPU; a latent counts as one KV head."""
    model = known_model(name)
    latent = model.kv_lora_rank or 0
    holders = 1 if latent else model.num_key_value_heads
    label = name.removesuffix("-hf").replace("7b", "7B")
    return Use(label, model.num_attention_heads, holders, latent, decode_intensity(model))


@lru_cache(maxsize=1024)
def _kind(
    model: str, gpu: str, context: int, wanted: int, heads: int, latent: int, tp: int = 0, kept: int | None = None
) -> Kind:
    """Compute one kind of attention; on `tp` GPUs, each GPU keeps `kept` KV heads unless it is
    None.
    """
    sibling = _sibling(model, heads, latent)
    places = []
    for gpus in TPS:
        share = ModelShare(sibling, get_hardware(gpu), gpus, kept if gpus == tp else None)
        places.append(_place(share, context, wanted))
    query_heads = sibling.num_attention_heads
    names = {query_heads: f"MHA, {query_heads} heads", 1: "MQA, 1 head"}
    name = f"latent, {latent}" if latent else names.get(heads, f"GQA, {heads} heads")
    return Kind(name, tuple(places))


def _sibling(model: str, heads: int, latent: int) -> ModelConfig:
    whole = known_model(model)
    return with_latent(whole, latent) if latent else with_kv_heads(whole, heads)


@lru_cache(maxsize=1024)
def _reserved(model: str, gpu: str, heads: int, latent: int, tp: int) -> int:
    """Count the bytes that a GPU needs besides the KV cache, even where they do not fit."""
    sibling = _sibling(model, heads, latent)
    if sibling.num_attention_heads % tp:
        return 0
    roomy = replace(get_hardware(gpu), memory_bytes=PLENTY)
    return int(PLENTY * UTILIZATION) - ModelShare(sibling, roomy, tp).ledger.kv_bytes


def _place(share: ModelShare, context: int, wanted: int) -> Place:
    divisible = share.model.num_attention_heads % share.tp == 0
    fits = speed = 0.0
    refused = ""
    try:
        fits = share.fits(context)
        speed = share.tokens_per_second(min(wanted, int(fits)), context)
    except MinivllmError as error:
        refused = str(error)
    return Place(
        tp=share.tp,
        kv_bytes=share.bytes_per_token if divisible else 0,
        copies=share.copies,
        intensity=share.intensity,
        fits=fits,
        tokens_per_second=speed,
        refused=refused,
        divisible=divisible,
    )


def _ranks(tp: int, holders: int, own: HeadsOfRank | None) -> tuple[tuple[tuple[int, ...], ...], str]:
    """Return the KV heads of each rank, and a description of what is wrong with them.

    Raises:
        MinivllmError: The reader's rule returns something other than KV heads, or does not end.
    """
    right = tuple(tuple(kv_heads_of_rank(rank, tp, holders)) for rank in range(tp))
    if own is None:
        return right, ""
    with bounded(PATIENCE, "your kv_heads_of_rank"):
        chosen = tuple(_checked(own(rank, tp, holders), rank, tp, holders) for rank in range(tp))
    first = next((rank for rank in range(tp) if chosen[rank] != right[rank]), None)
    if first is None:
        return chosen, ""
    needed, kept = (_heads(heads[first]) for heads in (right, chosen))
    return chosen, f"the query heads of rank {first} of {tp} need KV {needed}, but your rule gives it KV {kept}"


def _heads(heads: Sequence[int]) -> str:
    return f"head{'s' * (len(heads) != 1)} {', '.join(map(str, heads))}"


def _checked(heads: Any, rank: int, tp: int, holders: int) -> tuple[int, ...]:
    fits = isinstance(heads, list | tuple | range) and len(heads) > 0
    fits = fits and all(is_count(head, 0) and head < holders for head in heads)
    call = f"your kv_heads_of_rank({rank}, {tp}, {holders})"
    require(fits, f"{call} returns {heads!r}, which is not a list of KV heads from 0 to {holders - 1}")
    return tuple(heads)
