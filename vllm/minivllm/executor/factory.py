"""Look up executors by name. In vLLM v0.33.0: `Executor.get_class` in
`vllm/v1/executor/abstract.py`.
"""

from typing import Any

from minivllm.errors import MinivllmError
from minivllm.executor.abstract import Executor
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.ray_executor import RayExecutor
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.settings import WorkerSettings

EXECUTORS: dict[Any, type[Executor]] = {"mp": MultiprocExecutor, "ray": RayExecutor, "uni": UniprocExecutor}


def get_class(backend: str | None, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> type[Executor]:
    """Return the executor class of that name; for None, "uni" for one rank and "mp" for more.

    Raises:
        MinivllmError: unknown backend, or it cannot run that many ranks.
    """
    size = tensor_parallel_size * pipeline_parallel_size
    backend = backend if backend is not None else "uni" if size == 1 else "mp"
    if backend not in tuple(EXECUTORS):  # a tuple, since what was passed may not be hashable
        names = ", ".join(f'"{name}"' for name in EXECUTORS)
        raise MinivllmError(f"there is no distributed_executor_backend {backend!r}: use one of {names}, or None")
    most = EXECUTORS[backend].max_ranks
    if most is not None and size > most:
        setting = "tensor_parallel_size" + " x pipeline_parallel_size" * (pipeline_parallel_size > 1)
        raise MinivllmError(
            f'distributed_executor_backend "{backend}" runs {most} rank, but {setting} is {size}: use "mp"'
        )
    return EXECUTORS[backend]


def make_executor(settings: WorkerSettings, backend: str | None = None) -> Executor:
    """Create the executor of that name (`get_class`), whose ranks load their models.

    Raises:
        MinivllmError: unknown backend, settings that a rank rejects, or more ranks than GPUs.
        WorkerDiedError: a rank died before it was ready.
    """
    return get_class(backend, settings.tensor_parallel_size, settings.pipeline_parallel_size)(settings)
