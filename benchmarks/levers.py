"""The levers of the ablation: how each is switched on in the engine, and the workloads.

Every lever but one is a setting of `EngineArgs`. Grouped heads belong to the model, so an ungrouped
model is made here: the same function, with as many key-value heads as query heads. The pool has as
many blocks as a fixed number of bytes holds, so whatever a lever saves on keys, values or weights
makes room for more requests.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.memory import kv_bytes_per_token
from minivllm.models.linear import weight_bytes
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.engines.inside import runner_of
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import Levers, long_and_short, shared_chat, throughput

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
KV_TEXTS = 12  # full-length texts that fit in fp32 with grouped heads: the memory budget, beside the weights


@dataclass(frozen=True)
class Lever:
    """A technique. `rank` is its place in the list of thirteen; `exact` says whether it leaves
    every token unchanged.
    """

    name: str
    rank: int | None
    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] = field(default_factory=dict)
    exact: bool = True


LEVERS = [
    Lever("KV cache", None, off={"use_kv_cache": False}),
    Lever("paging", 1, off={"block_size": MAX_MODEL_LEN}),
    Lever("continuous batching", 2, off={"static_batching": True}),
    Lever("unified kernel", 3, off={"attention_backend": "naive"}),
    Lever("grouped heads", 4, off={"grouped_heads": False}),
    Lever(
        "chunked prefill",
        5,
        on={"max_num_batched_tokens": 256},
        off={"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
    ),
    Lever("prefix caching", 6, off={"enable_prefix_caching": False}),
    Lever("KV cache int8", 7, on={"kv_cache_dtype": "int8"}, exact=False),
    Lever("weights int8", 7, on={"quantization": "int8"}, exact=False),
    Lever(
        "speculation",
        8,
        on={"speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}},
    ),
    Lever("tensor parallel", 10, on={"tensor_parallel_size": 2}),
    Lever("CUDA graphs", 11, off={"enforce_eager": True}),
]
BY_NAME = {lever.name: lever for lever in LEVERS}


INTERACTING = ("paging", "continuous batching", "unified kernel", "prefix caching", "KV cache int8")
"""Levers whose gain depends most on the others: they decide how many requests share a step, and
its cost.
"""


def settings_of(on: Iterable[str]) -> dict[str, Any]:
    """Return the engine's settings with these levers on and all others off."""
    on, settings = set(on), {"block_size": 16}
    for lever in LEVERS:
        settings |= lever.on if lever.name in on else lever.off
    return settings


@dataclass(frozen=True)
class Work:
    """Requests that all arrive at once: prompts as token ids, and the number of output tokens of
    each.
    """

    name: str
    prompts: list[list[int]]
    outputs: list[int]


def works(quick: bool, seed: int) -> list[Work]:
    """Return a chat whose users share a system prompt, and a mix of long and short texts, none of
    which the model has seen.
    """
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    text = [token for document in held_out_texts() for token in tokenizer.encode(document).ids]
    rng, users = random.Random(seed), 8 if quick else 48

    def passage(length: int) -> list[int]:
        start = rng.randrange(len(text) - length)
        return text[start : start + length]

    system = passage(192)
    chat = [system + passage(rng.randint(16, 48)) for _ in range(users)]
    mixed = [passage(rng.randint(512, 768) if index % 4 == 3 else rng.randint(16, 64)) for index in range(users)]
    return [
        Work("chat", chat, [rng.randint(8, 64) for _ in chat]),
        Work("mixed", mixed, [rng.randint(8, 96) for _ in mixed]),
    ]


def engine_of(on: Iterable[str], folder: Path, device: str) -> EngineCore:
    """Return an engine with these levers on, and with as many blocks as the budget holds, plus the
    null block.

    If a model has to be made, it is written to `folder`.
    """
    settings = settings_of(on)
    model = EMBEDDED_MODEL if settings.pop("grouped_heads", True) else ungrouped_model(folder)
    per_token = kv_bytes_per_token(ModelConfig.from_pretrained(model), settings.get("kv_cache_dtype", "float32"))
    bytes_per_block = settings["block_size"] * per_token
    room = budget(device) - _weights(model, settings.get("quantization"), device)
    return _engine(model, device, num_gpu_blocks_override=max(2, room // bytes_per_block + 1), **settings)


@cache
def budget(device: str) -> int:
    """Return the bytes that weights and cache may take together."""
    kv = KV_TEXTS * MAX_MODEL_LEN * kv_bytes_per_token(ModelConfig.from_pretrained(EMBEDDED_MODEL), "float32")
    return kv + _weights(EMBEDDED_MODEL, None, device)


@cache
def _weights(model: Path, quantization: str | None, device: str) -> int:
    """Count the bytes of the weights as the engine holds them."""
    chosen = {"quantization": quantization} if quantization else {}
    core = _engine(model, device, num_gpu_blocks_override=1 + MAX_MODEL_LEN // 16, **chosen)
    return weight_bytes(runner_of(core).model)


def _engine(model: Path, device: str, **settings: Any) -> EngineCore:
    shape = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "dtype": "float32", "device": device}
    return EngineCore(EngineArgs(model=model, skip_tokenizer_init=True, **shape, **settings))


def ungrouped_model(folder: Path) -> Path:
    """Write the embedded model with its key-value heads copied until each query head has one: the
    same function, four times the cache.
    """
    target = folder / "ungrouped"
    if target.exists():
        return target
    target.mkdir()
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if "k_proj" in name or "v_proj" in name:
            by_head = tensor.unflatten(0, (kv_heads, -1))
            tensors[name] = torch.repeat_interleave(by_head, heads // kv_heads, dim=0).flatten(0, 1).contiguous()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config | {"num_key_value_heads": heads}))
    return target


MODELLED = {
    "KV cache": {"kv_cache": True},
    "paging": {"paging": True},
    "continuous batching": {"continuous_batching": True},
    "unified kernel": {"flash_attention": True},
    "grouped heads": {"gqa": True},
    "chunked prefill": {"chunked_prefill": True},
    "prefix caching": {"prefix_caching": True},
    "KV cache int8": {"kv_dtype": "fp8"},
    "weights int8": {"weight_bits": 8},
    "speculation": {"speculative_tokens": 3},
    "tensor parallel": {"tensor_parallel": 2},
    "CUDA graphs": {"cuda_graphs": True},
}
"""The simulator's fields for our levers."""
MODELLED_REQUESTS = 640


@cache
def modelled_factors() -> dict[str, dict[str, float]]:
    """Simulate leaving out one lever at a time with Llama-3.1-8B on an H100; return, by kind of work, the throughput of
    everything divided by that without the lever.

    Tensor parallelism is the other way round: the throughput of two GPUs divided by that of one.
    """
    everything = Levers(**{name: value for one in MODELLED.values() for name, value in one.items()})
    whole = replace(everything, tensor_parallel=1)
    config, hardware, found = known_model("Llama-3.1-8B"), get_hardware("H100"), {}
    for work in (shared_chat(MODELLED_REQUESTS), long_and_short(MODELLED_REQUESTS)):
        rate = throughput(whole, config, hardware, work).tokens_per_second
        without = {
            name: replace(whole, **{changed: getattr(Levers(), changed) for changed in fields})
            for name, fields in MODELLED.items()
        }
        factors = {n: rate / throughput(one, config, hardware, work).tokens_per_second for n, one in without.items()}
        factors["tensor parallel"] = throughput(everything, config, hardware, work).tokens_per_second / rate
        found[work.name] = factors
    return found
