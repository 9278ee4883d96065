"""One rank, in the engine's process. In vLLM v0.33.0: `vllm/v1/executor/uniproc_executor.py`
(`UniProcExecutor`).
"""

from concurrent.futures import Future
from typing import Any

from minivllm.core.scheduler_output import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.executor.abstract import Executor
from minivllm.executor.step_thread import StepThread
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.worker import Worker


class OutputFuture(Future[ModelRunnerOutput]):
    """The output of a step that a thread runs. Reading it waits for the step's tokens too, so that
    the thread need not.
    """

    def __init__(self, step: Future[ModelRunnerOutput | AsyncModelRunnerOutput]) -> None:
        super().__init__()
        self._step = step

    def done(self) -> bool:
        """Return whether the step has ended, with or without its tokens."""
        return self._step.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the step, then for its tokens; return its output."""
        output = self._step.result(timeout)
        return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


class UniprocExecutor(Executor):
    """One rank, in this process. If several steps may be in flight, a separate thread runs all of
    the rank's calls.
    """

    max_ranks = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self.max_concurrent_batches = settings.max_concurrent_batches
        self.worker = Worker(settings)
        self._thread = None
        if settings.max_concurrent_batches > 1:
            self._thread = StepThread()
            # The thread goes on to the next step without waiting for the GPU; `OutputFuture` waits.
            self.worker.defer_tokens()

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        call = getattr(self.worker, method)
        return [self._thread.call(method, call, *arguments) if self._thread else call(*arguments)]

    def _start(self, method: str, argument: SchedulerOutput | GrammarOutput) -> Future[ModelRunnerOutput]:
        if self._thread:
            return OutputFuture(self._thread.start(getattr(self.worker, method), argument))
        future: Future[ModelRunnerOutput] = Future()  # already done when it is returned
        try:
            future.set_result(getattr(self.worker, method)(argument))
        except Exception as error:
            future.set_exception(error)
        return future

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        return self.collective_rpc("take_draft_token_ids")[0]

    def shutdown(self) -> None:
        """Stop the threads, if any; no process was started."""
        self.worker.shutdown()
        if self._thread:
            self._thread.shutdown()
