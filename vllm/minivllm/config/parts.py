"""Parts of the engine that a caller may replace with their own, such as the solutions of the exercises.

    LLM(model, parts=Parts(scheduler=MyScheduler))

A part takes the place of the engine's own and must offer what that one offers; the engine does not check it. Parts are
Python objects, so they need the engine in this process: one rank, without `multiprocess`.

In vLLM v0.33.0 a scheduler is replaced by `scheduler_cls` (`vllm/config/scheduler.py`), and an attention backend by
`register_backend` (`vllm/v1/attention/backends/registry.py`); the other parts have no such place there.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from minivllm.config.checks import require


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What takes the place of the engine's own parts; None leaves a part as it is.

    - `scheduler`: called as `core.scheduler.Scheduler(scheduler_config, cache_config, parts)`.
    - `block_pool`: called as `core.block_pool.BlockPool(num_gpu_blocks, enable_caching)`.
    - `hash_block_tokens`: called as `core.block_hash.hash_block_tokens(parent, token_ids, extra_keys)`.
    - `attention`: called as `worker.paged_attention.PagedAttention(kv_caches, scale, sliding_window)`, once the caches
      are allocated.
    """

    scheduler: Callable[..., Any] | None = None
    block_pool: Callable[..., Any] | None = None
    hash_block_tokens: Callable[..., bytes] | None = None
    attention: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in self.names:
            part = getattr(self, name)
            require(callable(part), f"the part {name} is {part!r}; it must be a class or a function")

    @property
    def names(self) -> list[str]:
        """Names of the parts that are replaced."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


NO_PARTS = Parts()
"""The engine as it is."""
