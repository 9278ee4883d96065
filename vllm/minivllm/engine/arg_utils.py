"""Engine arguments, and the defaults that depend on the device.

In vLLM v0.33.0: `vllm/engine/arg_utils.py` (`EngineArgs`, `get_batch_defaults`), `vllm/config/`.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from minivllm.config import NO_PARTS, CacheConfig, ModelConfig, Parts, SchedulerConfig, SpeculativeConfig
from minivllm.config.cache import KV_CACHE_DTYPES
from minivllm.config.checks import is_count, is_number, require, require_flags
from minivllm.config.units import GIB
from minivllm.config.vllm_arguments import ANY_VALUE, takes_vllms_arguments
from minivllm.kernels.packed_weights import QUANTIZATIONS
from minivllm.worker.worker import WorkerSettings

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTION_BACKENDS = (None, "naive")
LOAD_FORMATS = ("auto", "dummy")
ROUTINGS = ("load", "prefix")


WITHOUT_EFFECT = {
    "allowed_local_media_path": ANY_VALUE,
    "async_scheduling": ANY_VALUE,
    "compilation_config": ANY_VALUE,
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0,),
    "data_parallel_backend": ("mp",),
    "disable_custom_all_reduce": ANY_VALUE,
    "disable_log_requests": ANY_VALUE,
    "disable_log_stats": ANY_VALUE,
    "enable_log_requests": ANY_VALUE,
    "generation_config": ("auto",),
    "max_logprobs": ANY_VALUE,
    "max_parallel_loading_workers": ANY_VALUE,
    "max_seq_len_to_capture": ANY_VALUE,
    "pipeline_parallel_size": (1,),
    "revision": ANY_VALUE,
    "runner": ("auto", "generate"),
    "swap_space": ANY_VALUE,
    "task": ("auto", "generate"),
    "tokenizer_mode": ANY_VALUE,
    "tokenizer_revision": ANY_VALUE,
    "trust_remote_code": ANY_VALUE,
}
NOT_SERVED = (
    "additional_config", "code_revision", "convert", "decode_context_parallel_size", "download_dir",
    "enable_expert_parallel", "enable_lora", "enable_prompt_embeds", "enable_return_routed_experts",
    "enable_sleep_mode", "hf_config_path", "hf_overrides", "hf_token", "kv_offloading_size", "kv_transfer_config",
    "language_model_only", "limit_mm_per_prompt", "logits_processors", "logprobs_mode", "lora_modules",
    "max_cpu_loras", "max_lora_rank", "max_loras", "mm_processor_kwargs", "model_impl", "model_loader_extra_config",
    "override_generation_config", "override_pooler_config", "pooler_config", "prefix_caching_hash_algo",
    "profiler_config", "quantization_param_path", "reasoning_parser", "served_model_name", "speculative_model",
    "structured_outputs_config", "worker_cls",
)  # fmt: skip


@takes_vllms_arguments("the engine", WITHOUT_EFFECT, NOT_SERVED)
@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The arguments of one engine. Names and defaults are vLLM's unless noted; None always means the default.

    - `model`: a local directory or a name on the Hugging Face Hub. `tokenizer`: the same, if not the model's own.
    - `dtype`: of weights and computation. "auto": the checkpoint's on a GPU; float32 on a CPU, which is what our CPU
      kernels use.
    - `kv_cache_dtype`: the storage dtype of keys and values. "auto": same as `dtype`; "int8_per_token_head" or "int8":
      integers with one scale per token and head; "fp8_e4m3" or "fp8": without scales, on GPUs that support it.
    - `quantization`: quantize the layers' weights at load time to "int8", with one scale per row, or "int4", with one
      scale per group of 16 to 128 values. None: as in the checkpoint.
    - `device`: "auto" is the GPU if there is one.
    - `load_format`: "dummy" uses random weights instead of reading the checkpoint's.
    - `max_model_len`: limit of prompt plus output, in tokens; None: the model's own.
    - `block_size`: tokens per KV-cache block.
    - `max_num_seqs`, `max_num_batched_tokens`: the most requests and tokens per step; None: depends on the device.
    - `gpu_memory_utilization`: fraction of the device's memory that the engine may use, 0 to 1; on a CPU, of the
      available memory. `num_gpu_blocks_override`: the number of blocks to use instead of what fits.
    - `use_kv_cache`: if False, every step recomputes all tokens of its requests; the keys and values are used only
      within that step. Not in vLLM; it serves to measure what the cache is worth.
    - `attention_backend`: None is the unified kernel; "naive" is its predecessor (`unified_attention`).
    - `speculative_config`: a dictionary as in vLLM, such as {"method": "ngram", "num_speculative_tokens": 4}.
    - `multiprocess`: run the core in a separate process. In vLLM: `VLLM_ENABLE_V1_MULTIPROCESSING`.
    - `tensor_parallel_size`: number of ranks that share the model, each on its own GPU, or all on one CPU.
    - `distributed_executor_backend`: "uni" runs the only rank in the core's process, "mp" each rank in its own, "ray"
      each in an actor of a Ray cluster (`uv sync --group dist`). None: "uni" for one rank, else "mp".
    - `data_parallel_size`: number of cores, each a process with the whole model and a cache of its own.
      `data_parallel_routing`: which core gets a request: "load", the least loaded one, as in vLLM, or "prefix", which
      prefers one that was recently sent the prompt's beginning (`load_balancing`). `data_parallel_retry`: when one of
      several cores dies, requests of which nothing has come yet are computed on another, once; else they fail as the
      others do. In vLLM one core's death is the end of all. The last two are not in vLLM.
    - `enforce_eager`: do not use CUDA graphs. On a CPU there are none anyway.
    - `seed`: seeds the random seeds of requests that do not set one.
    - `parts`: what takes the place of the engine's own parts (`config.parts`). Not in vLLM; it serves the exercises.
    - `skip_tokenizer_init`: prompts must be token ids, and outputs have no text.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.92
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    static_batching: bool = False
    use_kv_cache: bool = True
    attention_backend: str | None = None
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None
    multiprocess: bool = False
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    data_parallel_size: int = 1
    data_parallel_routing: str = "load"
    data_parallel_retry: bool = True
    enforce_eager: bool = False
    parts: Parts = NO_PARTS

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None and field.default not in (None, MISSING):
                object.__setattr__(self, field.name, field.default)
        require(
            isinstance(self.model, str | Path),
            f"model is {self.model!r}; it must be a directory, or a name on the Hugging Face hub",
        )
        require(
            self.tokenizer is None or (isinstance(self.tokenizer, str | Path) and bool(str(self.tokenizer))),
            f"tokenizer is {self.tokenizer!r}; it must be a directory, or a name on the Hugging Face hub",
        )
        require_flags(
            self, "skip_tokenizer_init", "enable_prefix_caching", "use_kv_cache", "multiprocess", "enforce_eager",
            "data_parallel_retry",
        )  # fmt: skip
        require(self.dtype in DTYPES, f"unknown dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        require(
            self.kv_cache_dtype in ("auto", *KV_CACHE_DTYPES),
            f"unknown kv_cache_dtype {self.kv_cache_dtype!r}; known are auto, {', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            self.quantization in (None, *QUANTIZATIONS),
            f"unknown quantization {self.quantization!r}; known are {', '.join(QUANTIZATIONS)}",
        )
        require(
            self.load_format in LOAD_FORMATS,
            f"unknown load_format {self.load_format!r}; known are {', '.join(LOAD_FORMATS)}",
        )
        require(
            is_number(self.gpu_memory_utilization) and 0.0 < self.gpu_memory_utilization <= 1.0,
            f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; it must be a share above 0 and up to 1",
        )
        require(
            self.attention_backend in ATTENTION_BACKENDS,
            f"unknown attention_backend {self.attention_backend!r}; known are None and 'naive'",
        )
        require(
            self.data_parallel_routing in ROUTINGS,
            f"unknown data_parallel_routing {self.data_parallel_routing!r}; known are {', '.join(ROUTINGS)}",
        )
        require(isinstance(self.parts, Parts), f"parts is {self.parts!r}; it must be Parts(...)")
        require(
            not self.parts.names or not (self.multiprocess or self._has_other_processes),
            f"parts ({', '.join(self.parts.names)}) cannot go to another process: leave out multiprocess, "
            "tensor_parallel_size, data_parallel_size and distributed_executor_backend",
        )
        SpeculativeConfig.of(self.speculative_config)
        require(is_count(self.seed, 0), f"seed is {self.seed!r}; it must be a whole number from 0 on")
        for name, least, by_default in (
            ("max_model_len", 2, True),
            ("block_size", 1, False),
            ("max_num_seqs", 1, True),
            ("max_num_batched_tokens", 1, True),
            ("num_gpu_blocks_override", 2, True),
            ("tensor_parallel_size", 1, False),
            ("data_parallel_size", 1, False),
        ):
            value = getattr(self, name)
            require(
                (value is None and by_default) or is_count(value, least),
                f"{name} is {value!r}; it must be a whole number of at least {least}",
            )

    @property
    def _has_other_processes(self) -> bool:
        several = self.tensor_parallel_size > 1 or self.data_parallel_size > 1
        return several or self.distributed_executor_backend in ("mp", "ray")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The speculative configuration, validated."""
        return SpeculativeConfig.of(self.speculative_config)

    def scheduler_config(self, config: ModelConfig, gpu_memory: int | None) -> SchedulerConfig:
        """Return the scheduler's settings for this model; `gpu_memory` is the GPU's in bytes, None on a CPU.

        Raises:
            MinivllmError: `max_model_len` exceeds the model's, or settings are incompatible.
        """
        default_tokens, default_seqs = _batch_defaults(gpu_memory)
        max_model_len = self.max_model_len or config.max_position_embeddings
        require(max_model_len > 0, "the model config does not say how long a text may be; give max_model_len")
        require(
            not config.max_position_embeddings or max_model_len <= config.max_position_embeddings,
            f"max_model_len is {max_model_len}; the model was made for {config.max_position_embeddings} tokens at most",
        )
        max_num_batched_tokens = self.max_num_batched_tokens or default_tokens
        if not self.enable_chunked_prefill and self.max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        return SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs or default_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.scheduling_policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
            scheduler_reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark=self.watermark,
            num_speculative_tokens=self.speculation.num_speculative_tokens if self.speculation else 0,
            num_lookahead_tokens=self.speculation.num_lookahead_tokens if self.speculation else 0,
            static_batching=self.static_batching,
        )

    def worker_settings(self, scheduler: SchedulerConfig, device: str, num_threads: int) -> WorkerSettings:
        """Return the ranks' settings; `device` is "cpu" or "cuda", `num_threads` the CPU threads of all ranks."""
        return WorkerSettings(
            model=self.model,
            device=device,
            dtype=self.dtype,
            load_format=self.load_format,
            seed=self.seed,
            kv_cache_dtype=self.kv_cache_dtype,
            quantization=self.quantization,
            attention_backend=self.attention_backend,
            attention=self.parts.attention,
            use_kv_cache=self.use_kv_cache,
            speculative_config=self.speculation,
            block_size=self.block_size,
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            tensor_parallel_size=self.tensor_parallel_size,
            num_threads=num_threads,
            enforce_eager=self.enforce_eager,
        )

    def cache_config(self, num_gpu_blocks: int) -> CacheConfig:
        """Return the block pool's settings, once its size is known."""
        return CacheConfig(
            num_gpu_blocks=num_gpu_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
        )


def _batch_defaults(gpu_memory: int | None) -> tuple[int, int]:
    """Return the default limits of tokens and requests per step."""
    if gpu_memory is None:
        return 2048, 256
    return (16384, 1024) if gpu_memory >= 70 * GIB else (8192, 256)
