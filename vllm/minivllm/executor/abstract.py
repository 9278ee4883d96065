"""Where the ranks run: the only one in the engine's process, or each of several in a process of its own.

Every rank gets the same calls in the same order. In vLLM v0.33.0: `vllm/v1/executor/abstract.py` (`Executor`).
"""

from typing import Any, Protocol

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.worker import WorkerSettings


class Executor(Protocol):
    """What the engine's core knows of the ranks. Every method raises `WorkerDiedError` where one has ended."""

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank's `Worker`; the results in order of rank."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step on all ranks; what rank 0 sampled."""
        ...

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Rank 0's drafts for what comes after the last step's tokens, by request id; once."""
        ...

    def shutdown(self) -> None:
        """Ends what was started; a second time it does nothing."""
        ...


def make_executor(settings: WorkerSettings) -> "UniprocExecutor | MultiprocExecutor":
    """The executor for so many ranks, their models loaded.

    Raises:
        MinivllmError: what any rank refuses, or more ranks than GPUs.
        WorkerDiedError: a rank ended before it was ready.
    """
    return UniprocExecutor(settings) if settings.tensor_parallel_size == 1 else MultiprocExecutor(settings)
