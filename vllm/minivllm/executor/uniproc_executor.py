"""One rank, in the engine's process. In vLLM v0.33.0: `vllm/v1/executor/uniproc_executor.py` (`UniProcExecutor`)."""

from typing import Any

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.worker.worker import Worker, WorkerSettings


class UniprocExecutor:
    """One rank, in this process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.worker = Worker(settings)

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """As `Executor`."""
        return [getattr(self.worker, method)(*arguments)]

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """As `Executor`."""
        return self.worker.execute_model(scheduler_output)

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """As `Executor`."""
        return self.worker.take_draft_token_ids()

    def shutdown(self) -> None:
        """Nothing was started."""
