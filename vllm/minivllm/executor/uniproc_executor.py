"""One rank, in the engine's process. In vLLM v0.33.0: `vllm/v1/executor/uniproc_executor.py` (`UniProcExecutor`)."""

from concurrent.futures import Future
from typing import Any

from minivllm.core.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.executor.abstract import Executor
from minivllm.worker.worker import Worker, WorkerSettings


class UniprocExecutor(Executor):
    """One rank, in this process."""

    max_tensor_parallel_size = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self.worker = Worker(settings)

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """See `Executor`."""
        return [getattr(self.worker, method)(*arguments)]

    def start_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """See `Executor`; the future is already done when returned."""
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.worker.execute_model(scheduler_output))
        except Exception as error:
            future.set_exception(error)
        return future

    def sample_tokens(self, grammar_output: GrammarOutput) -> ModelRunnerOutput:
        """See `Executor`."""
        return self.worker.sample_tokens(grammar_output)

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """See `Executor`."""
        return self.worker.take_draft_token_ids()

    def shutdown(self) -> None:
        """Does nothing, since no process was started."""
