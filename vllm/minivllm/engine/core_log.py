"""Find out how many blocks the ranks' memory has room for, and log where it goes and what each step
does.

In vLLM v0.33.0: `EngineCore._initialize_kv_caches` in `vllm/v1/engine/core.py`,
`vllm/v1/core/kv_cache_utils.py`.
"""

import torch

from minivllm.config import SchedulerConfig
from minivllm.config.units import GIB
from minivllm.core.limits import RequestLimits
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.executor.abstract import Executor
from minivllm.logger import init_logger
from minivllm.memory import MemoryLedger, max_concurrency
from minivllm.worker.memory_profiling import check_override

logger = init_logger(__name__)


def profile_ranks(args: EngineArgs, config: SchedulerConfig, executor: Executor) -> MemoryLedger | None:
    """Return the memory ledger of the rank with the fewest blocks; None if
    `num_gpu_blocks_override` sets the number of blocks.

    Raises:
        MinivllmError: a request of `max_model_len` tokens would not fit.
    """
    if args.num_gpu_blocks_override is not None:
        check_override(args.num_gpu_blocks_override, args.block_size, config.max_model_len)
        return None
    ledgers = executor.collective_rpc("memory_ledger", args.gpu_memory_utilization, args.host_tier_bytes)
    # All ranks use the same block ids, so the one with the least room decides.
    return min(ledgers, key=lambda ledger: ledger.num_blocks)


def log_memory(ledger: MemoryLedger | None, limits: RequestLimits, num_blocks: int, device: torch.device) -> None:
    """Log what the memory is used for, and how many requests of full length the cache holds."""
    for row in ledger.rows if ledger else ():
        logger.info("Memory: %.3f GiB %s%s", row.bytes / GIB, row.name, " (estimated)" if row.estimated else "")
    tokens = num_blocks * limits.block_size
    logger.info(
        "%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        "GPU" if device.type == "cuda" else device.type.upper(),
        f"{tokens:,}",
        f"{limits.max_model_len:,}",
        max_concurrency(tokens, limits.max_model_len),
    )


def log_step(output: SchedulerOutput, scheduler: Scheduler) -> None:
    """Log what a step computes, and what it leaves waiting."""
    logger.debug(
        "step of %d tokens %s; admitted %s, preempted %s; %d running, %d waiting, %d blocks free",
        output.total_num_scheduled_tokens,
        output.num_scheduled_tokens,
        [request.req_id for request in output.scheduled_new_reqs],
        sorted(output.preempted_req_ids),
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    )
