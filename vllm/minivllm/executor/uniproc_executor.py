"""One rank, in the engine's process. In vLLM v0.33.0: `vllm/v1/executor/uniproc_executor.py` (`UniProcExecutor`)."""

from concurrent.futures import Future
from typing import Any, Literal, overload

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.worker.worker import Worker, WorkerSettings


class UniprocExecutor:
    """One rank, in this process."""

    max_tensor_parallel_size: int | None = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self.worker = Worker(settings)

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """See `Executor`."""
        return [getattr(self.worker, method)(*arguments)]

    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[False] = False
    ) -> ModelRunnerOutput: ...
    @overload
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: Literal[True]
    ) -> Future[ModelRunnerOutput]: ...
    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """See `Executor`; the future is already done when returned."""
        if not non_block:
            return self.worker.execute_model(scheduler_output)
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.worker.execute_model(scheduler_output))
        except Exception as error:
            future.set_exception(error)
        return future

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """See `Executor`."""
        return self.worker.take_draft_token_ids()

    def shutdown(self) -> None:
        """Does nothing, since no process was started."""
