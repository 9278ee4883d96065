"""Engine arguments, and the defaults that depend on the device.

In vLLM v0.33.0: `vllm/engine/arg_utils.py` (`EngineArgs`, `get_batch_defaults`), `vllm/config/`.
"""

import argparse
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from minivllm.config import (
    EMBEDDED_MODEL,
    NO_PARTS,
    CacheConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    Parts,
    SchedulerConfig,
    SpeculativeConfig,
)
from minivllm.config.cache import KV_CACHE_DTYPES
from minivllm.config.checks import (
    Count,
    CountOrZero,
    Rule,
    at_least,
    check_fields,
    checked_arguments,
    is_number,
    one_of,
    require,
)
from minivllm.config.flags import add_flags, words_of
from minivllm.config.kv_offloading import is_tier, with_offloading
from minivllm.config.quantization import QUANTIZATIONS
from minivllm.config.speculative import NO_DRAFTS
from minivllm.config.units import GIB
from minivllm.core.policy import SchedulingPolicy

if TYPE_CHECKING:
    from minivllm.worker.settings import WorkerSettings  # brings torch, which a mistyped flag must not wait for

NOT_FLAGS = ("parts",)
MODEL = Rule(
    lambda value: isinstance(value, Path) or (isinstance(value, str) and value != ""),
    "a directory, or a name on the Hugging Face hub",
)
SHARE = Rule(lambda value: is_number(value) and 0.0 < value <= 1.0, "a fraction above 0 and at most 1")
PARTS = Rule(lambda value: isinstance(value, Parts), "Parts(...)")


@checked_arguments
@dataclass(kw_only=True, slots=True)
class EngineArgs:
    """The arguments of one engine. Names and defaults are vLLM's unless noted; None always means
    the default.

    Fields may be assigned. They are checked when the object is created, and again when an engine is
    made of it.

    - `model`: a local directory or a name on the Hugging Face Hub; by default the embedded one.
      `tokenizer`: a directory or a name, if it is not the model's own.
    - `dtype`: dtype of weights and computation. "auto": the checkpoint's on a GPU; float32 on a CPU,
      which is what our CPU kernels use.
    - `kv_cache_dtype`: the storage dtype of keys and values. "auto": same as `dtype`;
      "int8_per_token_head" or "int8": integers with one scale per token and head; "fp8_e4m3" or
      "fp8": without scales, on GPUs that support it.
    - `quantization`: quantize the layers' weights at load time to "int8", with one scale per row,
      or "int4", with one scale per group of 16 to 128 values. None: as in the checkpoint.
    - `device`: "auto" is the GPU if there is one.
    - `load_format`: "dummy" uses random weights instead of reading the checkpoint's.
    - `max_model_len`: limit of prompt plus output, in tokens; None: the model's own.
    - `block_size`: tokens per KV-cache block.
    - `max_num_seqs`, `max_num_batched_tokens`: maximum requests and tokens per step; None: depends
      on the device.
    - `gpu_memory_utilization`: fraction of the device's memory that the engine may use, 0 to 1; on
      a CPU, of the available memory. `num_gpu_blocks_override`: the number of blocks to use instead
      of what fits.
    - `use_kv_cache`: if False, every step recomputes all tokens of its requests; the keys and
      values are used only within that step. Not in vLLM; it exists to measure what the cache is
      worth.
    - `attention_backend`: None is the unified kernel; "naive" is its predecessor
      (`unified_attention`).
    - `speculative_config`: a dictionary as in vLLM, such as {"method": "ngram",
      "num_speculative_tokens": 4}.
    - `multiprocess`: run the core in a separate process. In vLLM: `VLLM_ENABLE_V1_MULTIPROCESSING`.
    - `tensor_parallel_size`: number of ranks that share the model, each on its own GPU, or all on
      one CPU.
    - `pipeline_parallel_size`: number of stages that the layers are divided over, each of
      `tensor_parallel_size` ranks. As many steps are in flight, each with different requests; not with
      `speculative_config`.
    - `distributed_executor_backend`: "uni" runs the only rank in the core's process, "mp" each rank
      in its own, "ray" each in an actor of a Ray cluster (`uv sync --group dist`). None: "uni" for
      one rank, else "mp".
    - `data_parallel_size`: number of cores, each a process with the whole model and a cache of its
      own. A request goes to the least loaded one (`load_balancing`); if one dies, all end.
    - `async_scheduling`: schedule a step while the one before it is computed. None: on a GPU,
      unless `parts` replace the scheduler. On a CPU the host's work and the model's share the same
      cores, so there is little to gain.
    - `enable_lora`: serve the LoRA adapters that requests name (`lora_request`). `max_loras`: slots
      on the device, the maximum adapters that run at once. `max_lora_rank`: the largest rank of an
      adapter; every slot has room for it. `max_cpu_loras`: adapters kept in host memory; None: as
      many as slots. `lora_dtype`: dtype of the adapters' weights; "auto" is the model's.
    - `enforce_eager`: do not use CUDA graphs, nor on a CPU the recordings of small steps.
    - `seed`: seeds the generator of seeds for requests that do not set one.
    - `kv_transfer_config`: the connector that moves keys and values to and from other engines, such
      as {"kv_connector": "NixlConnector", "kv_role": "kv_both"} (`config.kv_transfer`).
    - `kv_offloading_size`: GiB of host memory for a second tier of the KV cache, which extends the
      prefix cache; the total of a core's ranks, per core. It becomes part of `kv_transfer_config`,
      whose `kv_connector_extra_config` takes further options, such as `offload_prompt_only`
      (`kv_connector.offload.settings`).
    - `parts`: replacements for the engine's own parts (`config.parts`). Not in vLLM; it
      exists for the exercises.
    - `skip_tokenizer_init`: prompts must be token ids, and outputs have no text.
    """

    model: Annotated[str | Path, MODEL] = EMBEDDED_MODEL
    tokenizer: Annotated[str | Path, MODEL] | None = None
    skip_tokenizer_init: bool = False
    dtype: Annotated[str, one_of("auto", "float32", "float16", "bfloat16")] = "auto"
    kv_cache_dtype: Annotated[str, one_of("auto", *KV_CACHE_DTYPES)] = "auto"
    quantization: Annotated[str, one_of(*QUANTIZATIONS)] | None = None
    device: str = "auto"
    load_format: Annotated[str, one_of("auto", "dummy")] = "auto"
    seed: CountOrZero = 0
    max_model_len: Annotated[int, at_least(2)] | None = None
    block_size: Count = 16
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    gpu_memory_utilization: Annotated[float, SHARE] = 0.92
    num_gpu_blocks_override: Annotated[int, at_least(2)] | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduling_policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    static_batching: bool = False
    use_kv_cache: bool = True
    attention_backend: Annotated[str, one_of("naive")] | None = None
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None
    multiprocess: bool = False
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    distributed_executor_backend: Annotated[str, one_of("mp", "ray", "uni")] | None = None
    data_parallel_size: Count = 1
    async_scheduling: bool | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_dtype: str = "auto"
    enforce_eager: bool = False
    kv_transfer_config: Mapping[str, Any] | KVTransferConfig | None = None
    kv_offloading_size: float | None = None
    parts: Annotated[Parts, PARTS] = NO_PARTS

    def __post_init__(self) -> None:
        for field in fields(self):
            # Callers of vLLM pass None for what they do not set.
            may_be_none = field.name == "model" or field.default in (None, MISSING)
            if getattr(self, field.name) is None and not may_be_none:
                setattr(self, field.name, field.default)
        check_fields(self)
        # These check their own values.
        SpeculativeConfig.of(self.speculative_config)
        _ = self.lora_config
        self._check_ranks()
        self._check_parts()
        # The random `engine_id` must be chosen once.
        self.kv_transfer_config = with_offloading(self.kv_transfer_config, self.kv_offloading_size)
        self.kv_offloading_size = None
        self._check_kv_transfer()

    def _check_ranks(self) -> None:
        pipeline = self.pipeline_parallel_size
        num_ranks = self.tensor_parallel_size * pipeline
        require(
            self.distributed_executor_backend != "uni" or num_ranks == 1,
            f'distributed_executor_backend "uni" runs 1 rank, but tensor_parallel_size x pipeline_parallel_size is '
            f'{num_ranks}: use "mp"',
        )
        require(
            self.speculative_config is None or pipeline == 1,
            f"speculative_config conflicts with pipeline_parallel_size {pipeline}: leave one out",
        )
        require(
            not self.async_scheduling or pipeline == 1,
            f"async_scheduling conflicts with pipeline_parallel_size {pipeline}, whose steps in flight have different "
            "requests: leave one out",
        )

    def _check_parts(self) -> None:
        require(
            isinstance(self.parts.policy, SchedulingPolicy | None),
            f"the part policy is {self.parts.policy!r}; it must be SchedulingPolicy(...)",
        )
        require(
            # A learner's schedule knows nothing of placeholders for tokens in flight.
            not (self.async_scheduling and self._own_steps),
            f"async_scheduling needs the engine's own {self._own_steps}: leave it out, or the policy's replacement",
        )
        require(
            not (self.parts.draft_proposer and self.speculation and self.speculation.runs_model),
            "the part draft_proposer replaces a proposer that runs no model: "
            'give speculative_config the method "ngram", or leave out the part',
        )
        sizes = (self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)
        apart = self.multiprocess or max(sizes) > 1 or self.distributed_executor_backend in ("mp", "ray")
        require(
            # Parts are Python objects, and only plain data crosses to another process.
            not self.parts.names_in_core or not apart,
            f"parts ({', '.join(self.parts.names_in_core)}) cannot go to another process: leave out multiprocess, "
            "tensor_parallel_size, pipeline_parallel_size, data_parallel_size and distributed_executor_backend",
        )

    def _check_kv_transfer(self) -> None:
        transfer = self.kv_transfer
        if transfer is None:
            return
        # A tier talks to no other engine, so it goes with any division of the model.
        alone = is_tier(transfer)
        require(
            self.enable_prefix_caching or not alone,
            "a second tier of the KV cache extends the prefix cache: leave enable_prefix_caching on",
        )
        for name, fits, instead in (
            ("pipeline_parallel_size", alone or self.pipeline_parallel_size == 1, "use tensor_parallel_size"),
            ("data_parallel_size", alone or self.data_parallel_size == 1, "start a server for each core"),
            ("use_kv_cache", self.use_kv_cache, "leave it True"),
            ("parts.policy", not self._own_steps, f"leave out its {self._own_steps}"),
        ):
            require(fits, f"kv_transfer_config conflicts with this {name}: {instead}")

    @property
    def _own_steps(self) -> str:
        """The caller's scheduling rules that may not support async scheduling or KV connectors,
        joined by "and".
        """
        return " and ".join(name for name in ("schedule", "find_prefix") if name in self.parts.names)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, left_out: Collection[str] = NOT_FLAGS) -> argparse.ArgumentParser:
        """Add a flag for each argument, with its default, and return the parser."""
        further = {**words_of(CacheConfig), **words_of(SchedulerConfig)}
        # The field has another name in `SchedulerConfig`.
        further["scheduling_policy"] = further["policy"]
        add_flags(parser, EngineArgs, "Engine", left_out, further)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Return the engine arguments of a parsed command line.

        Raises:
            MinivllmError: one is invalid.
        """
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    @property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The KV connector's settings; None without a connector."""
        return KVTransferConfig.of(self.kv_transfer_config)

    @property
    def host_tier_bytes(self) -> int:
        """The bytes of host memory that a host tier may take; 0 if there is no tier or its size is
        given in blocks.
        """
        transfer = self.kv_transfer
        if transfer is None or not is_tier(transfer):
            return 0
        # The bytes of a block are known only when the model is loaded.
        in_blocks = transfer.get_from_extra_config("num_cpu_blocks")
        return 0 if in_blocks else int(transfer.get_from_extra_config("cpu_bytes_to_use") or 0)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The validated speculative configuration; None without speculation."""
        return SpeculativeConfig.of(self.speculative_config)

    @property
    def lora_config(self) -> LoRAConfig | None:
        """The validated LoRA settings; None without `enable_lora`."""
        config = LoRAConfig(**_shared_fields(self, LoRAConfig))
        return config if self.enable_lora else None

    def scheduler_config(self, config: ModelConfig, gpu_memory: int | None) -> SchedulerConfig:
        """Return the scheduler's settings for this model; `gpu_memory` is the GPU's memory in
        bytes, None on a CPU.

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
            # Without chunks, a step must have room for the longest prompt.
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        ahead = self.async_scheduling
        if ahead is None:
            ahead = gpu_memory is not None and not self._own_steps and self.pipeline_parallel_size == 1
        # Most settings have the same name on both sides; these are resolved here.
        own = _shared_fields(self, SchedulerConfig) | {
            "max_model_len": max_model_len,
            "max_num_seqs": self.max_num_seqs or default_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "async_scheduling": ahead,
            "max_loras": self.max_loras if self.enable_lora else 0,
        }
        drafting = self.speculation.drafting if self.speculation else NO_DRAFTS
        return SchedulerConfig(**own, policy=self.scheduling_policy, drafting=drafting)

    def worker_settings(self, scheduler: SchedulerConfig, device: str, num_threads: int) -> "WorkerSettings":
        """Return the ranks' settings; `device` is "cpu" or "cuda", `num_threads` the CPU threads
        of all ranks.
        """
        from minivllm.kernels.rejection_sample import rejection_sample
        from minivllm.worker.settings import WorkerSettings

        # Later ones go before earlier ones: the scheduler's limits are resolved, those of `self`
        # may be None.
        own = _shared_fields(self, WorkerSettings) | _shared_fields(scheduler, WorkerSettings)
        own |= _shared_fields(self.parts, WorkerSettings) | {
            "device": device,
            "rejection_sample": self.parts.rejection_sample or rejection_sample,
            "speculative_config": self.speculation,
            "kv_transfer_config": self.kv_transfer,
        }
        return WorkerSettings(**own, num_threads=num_threads)

    def cache_config(self, num_gpu_blocks: int) -> CacheConfig:
        """Return the block pool's settings, once its size is known."""
        return CacheConfig(num_gpu_blocks=num_gpu_blocks, **_shared_fields(self, CacheConfig))


AsyncEngineArgs = EngineArgs
"""vLLM's name for those of `AsyncLLM`."""


def _shared_fields(source: object, settings: type) -> dict[str, Any]:
    """Return the values of those fields of a settings class that `source` has under the same
    name.
    """
    names = [field.name for field in fields(settings)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


def _batch_defaults(gpu_memory: int | None) -> tuple[int, int]:
    """Return the default limits of tokens and requests per step."""
    if gpu_memory is None:
        return 2048, 256
    # As in vLLM: an H100 or larger, or a smaller GPU.
    return (16384, 1024) if gpu_memory >= 70 * GIB else (8192, 256)
