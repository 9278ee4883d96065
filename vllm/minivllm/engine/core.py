"""The core's loop: schedule, execute, update. Tokens in, tokens out; of text it knows nothing.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCore.step`, `_initialize_kv_caches`), where it runs in a process of
its own.
"""

from collections.abc import Iterable

import torch

from minivllm.config import ModelConfig
from minivllm.core.output import EngineCoreOutput
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.stats import SchedulerStats
from minivllm.engine.core_request import EngineCoreRequest
from minivllm.engine.engine_args import EngineArgs
from minivllm.lab.allocator import keep_freed_memory
from minivllm.lab.device import pick_device
from minivllm.models.loader import load_model, random_model
from minivllm.models.quantized import quantize_linears
from minivllm.scheduler_config import SchedulerConfig
from minivllm.simulate.memory import MemoryLedger
from minivllm.worker.memory import check_override, profile_memory
from minivllm.worker.model_runner import ModelRunner


class EngineCore:
    """A scheduler and a model runner. `ledger` says what the memory went to; None where the blocks were set by hand."""

    def __init__(self, args: EngineArgs) -> None:
        device = pick_device(args.device)
        if device.type == "cpu":
            keep_freed_memory()
        model = _load(args, device)
        self.model_config: ModelConfig = model.config
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        config = args.scheduler_config(model.config, memory)
        self.runner = ModelRunner(
            model,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=args.block_size,
            kv_cache_dtype=args.kv_cache_dtype,
            speculative_config=args.speculation,
            attention_backend=args.attention_backend,
            use_kv_cache=args.use_kv_cache,
        )
        self.ledger = self._profile(args, config)
        num_blocks = self.ledger.num_blocks if self.ledger else args.num_gpu_blocks_override
        assert num_blocks is not None
        self.runner.initialize_kv_cache(num_blocks)
        self.scheduler = Scheduler(config, args.cache_config(num_blocks))

    def add_request(self, request: EngineCoreRequest) -> None:
        """Puts a request into the queue. Raises `MinivllmError` for one that could never finish."""
        self.scheduler.add_request(request.to_request())

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests, wherever they stand; those that are not there are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_unfinished_requests()

    def step(self) -> list[EngineCoreOutput]:
        """One step: who gets how many tokens, a forward pass, and what came of it."""
        scheduler_output = self.scheduler.schedule()
        model_runner_output = self.runner.execute_model(scheduler_output)
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output)
        if self.runner.proposer:
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self.scheduler.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Returns False, and does nothing, while any request holds a block."""
        return self.scheduler.reset_prefix_cache()

    def _profile(self, args: EngineArgs, config: SchedulerConfig) -> MemoryLedger | None:
        if args.num_gpu_blocks_override is not None:
            check_override(args.num_gpu_blocks_override, args.block_size, config.max_model_len)
            return None
        return profile_memory(
            self.model_config,
            self.runner.device,
            self.runner.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            weights=self.runner.weight_bytes(),
            activation_peak=self.runner.activation_peak(config.max_num_batched_tokens, config.max_num_seqs),
            block_size=args.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=args.gpu_memory_utilization,
        )


def _load(args: EngineArgs, device: torch.device):
    dtype = "float32" if args.dtype == "auto" and device.type == "cpu" else args.dtype
    if args.load_format == "dummy":
        model = random_model(ModelConfig.from_pretrained(args.model), args.seed, device, dtype)
    else:
        model = load_model(args.model, device, dtype)[0]
    if args.quantization:
        quantize_linears(model, args.quantization)
    return model
