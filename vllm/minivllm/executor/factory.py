"""Look up executors by name. In vLLM v0.33.0: `Executor.get_class` in
`vllm/v1/executor/abstract.py`.
"""

from minivllm.executor.abstract import Executor
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.ray_executor import RayExecutor
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.settings import WorkerSettings

EXECUTORS: dict[str, type[Executor]] = {"mp": MultiprocExecutor, "ray": RayExecutor, "uni": UniprocExecutor}


def make_executor(settings: WorkerSettings, backend: str | None = None) -> Executor:
    """Create the executor of that name, whose ranks load their models; for None, "uni" for one rank
    and "mp" for more.

    Raises:
        MinivllmError: settings that a rank rejects, or more ranks than GPUs.
        WorkerDiedError: a rank died before it was ready.
    """
    return EXECUTORS[backend or ("uni" if settings.world_size == 1 else "mp")](settings)
