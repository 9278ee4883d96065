"""Run a rank's calls in order in a thread, so that the caller can schedule the next step meanwhile.

PyTorch's kernels and the waits for a GPU release the GIL, so the two run at the same time. As with
a rank in a process (`rank_loop`), the failure of a step answers all further calls until the call
`reset`: the steps queued after it would find the rank in an unknown state. A reset answers the
steps that are still queued in the same way.

vLLM v0.33.0 needs no such thread: `UniProcExecutor` in `vllm/v1/executor/uniproc_executor.py` runs
the call, which only queues work for the GPU, and returns an `AsyncOutputFuture` that waits for the
result when it is read.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from minivllm.errors import WorkerFailedError
from minivllm.executor.rank_messages import RESET


class StepThread:
    """A thread that runs a rank's calls, started with the first call. All calls must be made from
    one other thread.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="minivllm-steps")
        self._failure: Exception | None = None

    def start(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call; return a future of its result."""
        return self._pool.submit(self._run, call, *arguments)

    def call(self, method: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a call of this name after all queued calls; return its result."""
        if method != RESET:
            return self.start(call, *arguments).result()
        # Steps that still wait in the queue must not run before the reset.
        self._failure = self._failure or WorkerFailedError("the step was dropped: the one before it has failed")
        return self._pool.submit(self._reset, call).result()

    def shutdown(self) -> None:
        """Stop the thread once its calls have ended."""
        self._pool.shutdown(wait=False)

    def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        try:
            return call(*arguments)
        except Exception as error:
            self._failure = error
            raise

    def _reset(self, call: Callable[..., Any]) -> None:
        self._failure = None
        call()
