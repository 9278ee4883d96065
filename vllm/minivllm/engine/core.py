"""The core's loop: schedule, execute, update. Tokens in, tokens out; of text it knows nothing.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCore.step`, `_initialize_kv_caches`), where it runs in a process of
its own.
"""

from collections.abc import Iterable

import torch

from minivllm.config import ModelConfig, SchedulerConfig
from minivllm.config.units import GIB
from minivllm.core.output import EngineCoreOutput
from minivllm.core.request import RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.stats import SchedulerStats
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_request import EngineCoreRequest
from minivllm.errors import MinivllmError
from minivllm.executor.abstract import make_executor
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.logger import init_logger
from minivllm.memory import MemoryLedger, max_concurrency
from minivllm.models.parallel import shard_config
from minivllm.platforms.device import pick_device
from minivllm.worker.memory_profiling import check_override, profile_memory
from minivllm.worker.model_runner import ModelRunner

logger = init_logger(__name__)


class EngineCore:
    """A scheduler and an executor of its steps.

    `ledger` says what the memory of a rank went to, of the one with the fewest blocks; None where the blocks were set
    by hand.
    """

    def __init__(self, args: EngineArgs) -> None:
        device = pick_device(args.device)
        self._speculates = args.speculation is not None
        self.model_config = ModelConfig.from_pretrained(args.model)
        shard_config(self.model_config, args.tensor_parallel_size)
        memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else None
        config = args.scheduler_config(self.model_config, memory)
        self.executor = make_executor(args.worker_settings(config, device.type, torch.get_num_threads()))
        try:
            self.ledger = self._profile(args, config)
            num_blocks = self.ledger.num_blocks if self.ledger else args.num_gpu_blocks_override
            assert num_blocks is not None
            self.executor.collective_rpc("initialize_kv_cache", num_blocks)
        except BaseException:
            self.executor.shutdown()
            raise
        self.scheduler = Scheduler(config, args.cache_config(num_blocks))
        self._log_memory()

    @property
    def runner(self) -> ModelRunner:
        """The model runner, where it is in this process.

        Raises:
            MinivllmError: it is not; there are several, each in its own.
        """
        if not isinstance(self.executor, UniprocExecutor):
            raise MinivllmError("with a tensor_parallel_size above 1 the model runs in other processes")
        return self.executor.worker.runner

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
        model_runner_output = self.executor.execute_model(scheduler_output)
        outputs = self.scheduler.update_from_output(scheduler_output, model_runner_output)
        if self._speculates:
            self.scheduler.update_draft_token_ids(self.executor.take_draft_token_ids())
        return outputs

    def make_stats(self) -> SchedulerStats:
        """The scheduler's state now."""
        return self.scheduler.make_stats()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Returns False, and does nothing, while any request holds a block."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the processes of the ranks, where they have some. No step can be made after it."""
        self.executor.shutdown()

    def _log_memory(self) -> None:
        if self.ledger is not None:
            for row in self.ledger.rows:
                logger.info("Memory: %.3f GiB %s%s", row.bytes / GIB, row.name, " (estimated)" if row.estimated else "")
        cache = self.scheduler.cache_config
        tokens, max_model_len = cache.num_gpu_blocks * cache.block_size, self.scheduler.config.max_model_len
        logger.info("KV cache size: %s tokens in %s blocks", f"{tokens:,}", f"{cache.num_gpu_blocks:,}")
        concurrency = max_concurrency(tokens, max_model_len)
        logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{max_model_len:,}", concurrency)

    def _profile(self, args: EngineArgs, config: SchedulerConfig) -> MemoryLedger | None:
        if args.num_gpu_blocks_override is not None:
            check_override(args.num_gpu_blocks_override, args.block_size, config.max_model_len)
            return None
        ledgers = [
            profile_memory(
                self.model_config,
                use,
                tp=args.tensor_parallel_size,
                kv_cache_dtype=args.kv_cache_dtype,
                block_size=args.block_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                gpu_memory_utilization=args.gpu_memory_utilization,
            )
            for use in self.executor.collective_rpc("memory_use")
        ]
        return min(ledgers, key=lambda ledger: ledger.num_blocks)
