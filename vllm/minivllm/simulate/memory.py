"""What the memory of a GPU goes to: weights, working space, and the KV cache with the tokens that it holds.

Counts, not estimates, wherever a figure follows from the model's shape; they equal what vLLM prints at start-up
("GPU KV cache size", "Maximum concurrency"). Only models in which every layer keeps every token are counted; all others
are refused with an `UnsupportedModelError`.

In vLLM: `vllm/v1/kv_cache_interface.py` (`AttentionSpec.page_size_bytes`), `vllm/v1/core/kv_cache_planning.py`
(`get_kv_cache_configs`, `check_enough_kv_cache_memory`, `estimate_max_model_len`) and
`vllm/v1/worker/gpu_worker.py` (`Worker.determine_available_memory`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.checks import is_count, is_number, require
from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.simulate import parameters
from minivllm.simulate.hardware import GIB, Hardware, get_hardware

Model = ModelConfig | Mapping[str, Any]

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
SCALE_BYTES = 4  # a float32 scale for each token and head, for K and for V
KV_DTYPES = ("auto", *DTYPE_BYTES, "int8_per_token_head", "fp8_per_token_head", "nvfp4")

# Working memory, where it is not measured. The estimate of activations fits the peaks in start-up logs of vLLM within
# 6 % (tests/simulate/startup_logs.py); the other figures are what such logs typically say.
SAMPLER_BYTES_PER_LOGIT = 39  # float32 copies, sorted values and 8-byte indices of [max_num_seqs, vocab] logits
NON_TORCH_BYTES = GIB // 10
NON_TORCH_BYTES_TP = GIB  # with NCCL's buffers
CUDA_GRAPH_BYTES = GIB // 2


def kv_bytes_per_token(model: Model, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Bytes that one token occupies in the KV cache of *one* GPU, over all layers.

    `2 * layers * KV heads * head_dim * bytes`, the 2 being K and V. KV heads are divided over `tp` GPUs; beyond one
    head a GPU they are held several times over. Multi-head latent attention keeps one latent vector and the rotary part
    of the key instead, whole on every GPU: `layers * (kv_lora_rank + qk_rope_head_dim) * bytes`.

    Args:
        model: a ModelConfig or the contents of a `config.json`.
        kv_dtype: "auto" is what vLLM would take: the dtype that a quantized checkpoint asks for, else the model's own,
            in 16 bits where the checkpoint has 32. The fp8 forms are one byte each, with scales per tensor, which take
            no room in the cache. "int8_per_token_head" (or "int8") and "fp8_per_token_head" add a float32 scale for
            each token and head of K and of V; "nvfp4" is half a byte and one byte of scale for every 16 values.
        tp: GPUs that share one copy of the model.

    Raises:
        UnsupportedModelError: not every layer keeps every token, so no figure per token exists.
        MinivllmError: unknown dtype, or KV heads that cannot be divided over `tp` GPUs.
    """
    config = _config(model)
    _refuse_forgetful(config)
    kv_dtype = cache_dtype(config, kv_dtype)
    heads = parameters.kv_heads_on_rank(config, tp)
    if config.kv_lora_rank is not None:
        if kv_dtype not in DTYPE_BYTES:
            raise MinivllmError(f"a latent cache has no heads, so {kv_dtype!r} does not apply to it")
        width = config.kv_lora_rank + (config.qk_rope_head_dim or 0)
        return config.num_hidden_layers * width * DTYPE_BYTES[kv_dtype]
    return config.num_hidden_layers * 2 * heads * _head_bytes(config.head_dim, kv_dtype)


def kv_cache_tokens(kv_bytes: int, model: Model, block_size: int = 16, kv_dtype: str = "auto", tp: int = 1) -> int:
    """Tokens that `kv_bytes` of one GPU hold, in whole blocks: vLLM's "GPU KV cache size".

    vLLM counts block 0 too, although that is its null block and never holds a token of a request.
    """
    require(is_number(kv_bytes), f"kv_bytes is {kv_bytes!r}; it must be a number of bytes")
    if kv_bytes < 0:
        raise MinivllmError(f"nothing is left for the KV cache: {kv_bytes / GIB:.2f} GiB")
    block_bytes = kv_bytes_per_token(model, kv_dtype, tp) * _positive("block_size", block_size)
    return int(kv_bytes // block_bytes) * block_size


def max_concurrency(tokens: int, max_model_len: int) -> float:
    """How many requests of the greatest length fit at once: vLLM's "Maximum concurrency for N tokens per request"."""
    require(is_number(tokens) and tokens >= 0, f"tokens is {tokens!r}; it must be a number, and not negative")
    return tokens / _positive("max_model_len", max_model_len)


def num_parameters(model: Model) -> int:
    """Parameters of the whole model: every weight, bias and norm; tied embeddings once."""
    return parameters.num_parameters(_config(model))


def weight_bytes(model: Model, dtype: str = "auto", tp: int = 1) -> int:
    """Bytes of the weights on one of `tp` GPUs, with every parameter in `dtype`.

    A quantized checkpoint keeps some parts in 16 bits and adds scales, so its size does not follow from the shape:
    "auto" is refused for one.

    Raises:
        UnsupportedModelError: the parts of this type of model are not known (see `parameters`).
        MinivllmError: unknown dtype, a quantized checkpoint, a field missing, heads that cannot be divided.
    """
    config = _config(model)
    if dtype == "auto":
        if config.quantization:
            raise MinivllmError(
                f"the size of a checkpoint quantized with {config.quantization!r} does not follow from its shape; "
                f"give a dtype, or the size itself"
            )
        dtype = serving_dtype(config)
    return sum(parameters.parameter_groups(config, tp).values()) * _bytes_of(dtype)


def rotary_table_bytes(model: Model, dtype: str = "auto") -> int:
    """Bytes of the table of cosines and sines, one row for each position, that is loaded beside the weights.

    It is not divided over GPUs. Weights and table together are vLLM's "Model loading took N GiB".
    """
    config = _config(model)
    if config.model_type in ("gpt2", "opt"):
        return 0  # learned positions are parameters
    width = config.head_dim if config.kv_lora_rank is None else config.qk_rope_head_dim or 0
    return config.max_position_embeddings * width * _bytes_of(serving_dtype(config) if dtype == "auto" else dtype)


def serving_dtype(model: Model) -> str:
    """The dtype in which vLLM runs a model by default: its own, or bfloat16 where that is float32.

    vLLM: `_resolve_auto_dtype` in `vllm/config/model.py`.
    """
    dtype = _config(model).dtype
    return "bfloat16" if dtype == "float32" else dtype


def cache_dtype(model: Model, kv_dtype: str = "auto") -> str:
    """The dtype that "auto" stands for; any other known one as it is.

    Raises:
        MinivllmError: the dtype is not known.
    """
    config = _config(model)
    if kv_dtype == "auto":
        kv_dtype = config.checkpoint_kv_dtype or serving_dtype(config)
    if kv_dtype == "int8":  # integers that all tokens of a tensor share a scale of are not worth having
        kv_dtype = "int8_per_token_head"
    if kv_dtype not in KV_DTYPES:
        raise MinivllmError(f"unknown dtype of the KV cache {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
    return kv_dtype


@dataclass(frozen=True)
class LedgerRow:
    """One use of device memory."""

    name: str
    bytes: int
    estimated: bool = False
    """Is this figure an estimate (True) or counted or given (False)?"""


@dataclass(frozen=True)
class MemoryLedger:
    """What the memory of one GPU goes to, to the last byte. The rows sum to what the GPU has."""

    hardware: Hardware
    rows: tuple[LedgerRow, ...]
    kv_bytes: int
    """Left for the KV cache: vLLM's "Available KV cache memory"."""
    bytes_per_token: int
    block_size: int
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.kv_bytes // (self.block_size * self.bytes_per_token)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can have: all but block 0, the null block."""
        return max(0, self.num_blocks - 1)

    @property
    def tokens(self) -> int:
        """Tokens in all blocks: vLLM's "GPU KV cache size"."""
        return self.num_blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at once."""
        return max_concurrency(self.tokens, self.max_model_len)

    @property
    def longest_request(self) -> int:
        """The longest request that the usable blocks can hold, in tokens."""
        return self.usable_blocks * self.block_size

    def check(self) -> None:
        """Refuse to start where one request of `max_model_len` tokens does not fit.

        Raises:
            MinivllmError: it does not; the message says which length would.
        """
        if self.max_model_len <= self.longest_request:
            return
        needed = (-(-self.max_model_len // self.block_size) + 1) * self.block_size * self.bytes_per_token
        advice = (
            f"set max_model_len to {self.longest_request} or less"
            if self.longest_request
            else "not even one block of tokens fits"
        )
        raise MinivllmError(
            f"one request of max_model_len = {self.max_model_len} tokens needs {needed / GIB:.2f} GiB of KV cache, and "
            f"{self.kv_bytes / GIB:.2f} GiB are left on the {self.hardware.name}: {advice}, or give the engine more "
            f"memory (a higher gpu_memory_utilization, a smaller KV dtype, more GPUs)"
        )


def memory_ledger(
    model: Model,
    hardware: Hardware | str,
    *,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.92,
    tp: int = 1,
    kv_dtype: str = "auto",
    weight_dtype: str = "auto",
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    weights: int | None = None,
    activation_peak: int | None = None,
    non_torch: int | None = None,
    cuda_graphs: int | None = None,
    check: bool = True,
) -> MemoryLedger:
    """Share out the memory of one GPU as vLLM does at start-up: what the budget leaves beside all else is KV cache.

    Args:
        model: a ModelConfig or the contents of a `config.json`.
        hardware: an entry of the hardware table, or its name.
        max_model_len: the longest request, prompt and output together; the model's own limit where None.
        gpu_memory_utilization: the share of the device memory that the engine may use at all.
        tp: GPUs that share one copy of the model; the ledger is of one of them.
        kv_dtype, weight_dtype: see `kv_bytes_per_token` and `weight_bytes`.
        block_size: tokens in a block of the KV cache.
        max_num_batched_tokens, max_num_seqs: the largest step, whose activations the profiling run measures.
        weights, activation_peak, non_torch, cuda_graphs: bytes, where they are known from a start-up log or a
            measurement; else weights (with their rotary table) are counted and the others estimated.
        check: raise if a request of `max_model_len` does not fit; without it, the ledger is returned all the same.

    Raises:
        MinivllmError: nothing is left for the KV cache, a request of `max_model_len` does not fit (the message says
            which length would), or an argument makes no sense.
        UnsupportedModelError: the memory of this model cannot be counted.
    """
    config = _config(model)
    hardware = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    if not is_number(gpu_memory_utilization) or not 0 < gpu_memory_utilization <= 1:
        raise MinivllmError(f"gpu_memory_utilization is a share above 0 and up to 1, not {gpu_memory_utilization!r}")
    given = {"weights": weights, "activation_peak": activation_peak, "non_torch": non_torch, "cuda_graphs": cuda_graphs}
    for name, value in given.items():
        if value is not None and not (is_number(value) and value >= 0):
            raise MinivllmError(f"{name} is {value!r}; it must be a number of bytes, or None")
    if max_model_len is None:
        config.require("max_position_embeddings")
        max_model_len = config.max_position_embeddings
    per_token = kv_bytes_per_token(config, kv_dtype, tp)
    block_bytes = per_token * _positive("block_size", block_size)
    budget = int(hardware.memory_bytes * gpu_memory_utilization)
    loaded = _loaded_bytes(config, weight_dtype, tp) if weights is None else int(weights)
    before_cache = (
        LedgerRow("weights and rotary table", loaded),
        _row(
            "activations", activation_peak, estimated_activation_peak(config, max_num_batched_tokens, max_num_seqs, tp)
        ),
        _row("outside torch", non_torch, NON_TORCH_BYTES if tp == 1 else NON_TORCH_BYTES_TP),
        _row("CUDA graphs", cuda_graphs, CUDA_GRAPH_BYTES),
    )
    kv_bytes = budget - sum(row.bytes for row in before_cache)
    if kv_bytes < block_bytes:
        used = ", ".join(f"{row.name} {row.bytes / GIB:.2f}" for row in before_cache)
        raise MinivllmError(
            f"nothing is left for the KV cache on the {hardware.name}: of {budget / GIB:.2f} GiB "
            f"({gpu_memory_utilization} of {hardware.memory_bytes / GIB:.2f}) go to {used} GiB"
        )
    rows = (
        *before_cache,
        LedgerRow("KV cache", kv_bytes // block_bytes * block_bytes),
        LedgerRow("less than a block", kv_bytes % block_bytes),
        LedgerRow("not ours to use", hardware.memory_bytes - budget),
    )
    ledger = MemoryLedger(hardware, rows, kv_bytes, per_token, block_size, _positive("max_model_len", max_model_len))
    if check:
        ledger.check()
    return ledger


def estimated_activation_peak(config: ModelConfig, max_num_batched_tokens: int, max_num_seqs: int, tp: int = 1) -> int:
    """About the most working memory that one step needs, in bytes: the MLP of a full prefill step, or the sampler.

    Where the config does not give the widths, that part counts as nothing.
    """
    mlp_width = -(-(config.intermediate_size or config.moe_intermediate_size) // tp)
    mlp = _positive("max_num_batched_tokens", max_num_batched_tokens) * 3 * (config.hidden_size + mlp_width) * 2
    sampler = _positive("max_num_seqs", max_num_seqs) * config.vocab_size * SAMPLER_BYTES_PER_LOGIT
    return max(mlp, sampler)


def _loaded_bytes(config: ModelConfig, dtype: str, tp: int) -> int:
    return weight_bytes(config, dtype, tp) + rotary_table_bytes(config)


def _row(name: str, given: int | None, estimate: int) -> LedgerRow:
    return LedgerRow(name, estimate, estimated=True) if given is None else LedgerRow(name, int(given))


def _config(model: Model) -> ModelConfig:
    return model if isinstance(model, ModelConfig) else ModelConfig.from_dict(model)


def _refuse_forgetful(config: ModelConfig) -> None:
    """Raise unless every layer keeps the key and value of every token."""
    reason = config.cache_exception
    if reason is None and config.sliding_window is not None:
        reason = f"every layer keeps only the last {config.sliding_window} tokens"
    if reason is None and config.layer_types and set(config.layer_types) != {"full_attention"}:
        reason = "some of its layers keep only the tokens inside a window"
    if reason is not None:
        name = config.architecture or config.model_type or "this model"
        raise UnsupportedModelError(f"{name}: {reason}, so its cache is not so many bytes a token")


def _bytes_of(dtype: str) -> int:
    if dtype not in tuple(DTYPE_BYTES):
        raise MinivllmError(f"unknown dtype of weights {dtype!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one head's key (or value) of one token."""
    if kv_dtype == "nvfp4":
        if head_dim % 16:
            raise MinivllmError(f"nvfp4 needs a head_dim that is a multiple of 16, not {head_dim}")
        return head_dim // 2 + head_dim // 16
    if kv_dtype.endswith("_per_token_head"):
        return head_dim + SCALE_BYTES
    return head_dim * DTYPE_BYTES[kv_dtype]


def _positive(name: str, value: int) -> int:
    require(is_count(value, 1), f"{name} must be a positive whole number, not {value!r}")
    return value
