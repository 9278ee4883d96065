"""One rank, in the engine's process. In vLLM v0.33.0: `vllm/v1/executor/uniproc_executor.py`
(`UniProcExecutor`).

If several steps may be in flight, a thread runs the rank's calls in order, so that the caller can
schedule the next step meanwhile: PyTorch's kernels and the waits for a GPU release the GIL. As with
a rank in a process (`rank_loop`), the failure of a step answers all further calls until the call
`reset`, because the steps queued after it would find the rank in an unknown state.

vLLM needs no such thread: its executor runs the call, which only queues work for the GPU, and
returns an `AsyncOutputFuture` that waits for the result when it is read.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.core.scheduler_output import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.errors import WorkerFailedError
from minivllm.executor.abstract import Executor
from minivllm.executor.rank_loop import RESET
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
    """One rank, in this process. All calls must be made from one thread."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.max_concurrent_batches = settings.max_concurrent_batches
        self.worker = Worker(settings)
        self._failure: Exception | None = None
        self._thread = None
        if settings.max_concurrent_batches > 1:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="minivllm-steps")
            # The thread goes on to the next step without waiting for the GPU; `OutputFuture` waits.
            self.worker.defer_tokens()

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        if self._thread is None:
            return [getattr(self.worker, method)(*arguments)]
        if method == RESET:
            # Steps that still wait in the queue must not run before the reset.
            self._failure = self._failure or WorkerFailedError("the step was dropped: the one before it has failed")
        return [self._thread.submit(self._run, method, *arguments).result()]

    def _start(self, method: str, argument: SchedulerOutput | GrammarOutput) -> Future[ModelRunnerOutput]:
        if self._thread is not None:
            return OutputFuture(self._thread.submit(self._run, method, argument))
        future: Future[ModelRunnerOutput] = Future()  # already done when it is returned
        try:
            future.set_result(getattr(self.worker, method)(argument))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Stop the threads, if any; no process was started."""
        self.worker.shutdown()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _run(self, method: str, *arguments: Any) -> Any:
        """Run a call in the thread, unless a call since the last reset has failed."""
        if method == RESET:
            self._failure = None
        if self._failure is not None:
            raise self._failure
        try:
            return getattr(self.worker, method)(*arguments)
        except Exception as error:
            self._failure = error
            raise
