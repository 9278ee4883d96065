"""The interface of executors, which run the ranks: a single one in the engine's process, or each in
a separate process.

Every rank gets the same calls in the same order. In vLLM v0.33.0: `vllm/v1/executor/abstract.py`
(`Executor`).
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from minivllm.core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.worker.settings import WorkerSettings


class Executor(ABC):
    """The engine core's interface to the ranks.

    All methods but `shutdown` raise `WorkerDiedError` if a rank has died, and the engine ends. If a
    call fails on a rank, they raise the rank's own error or `WorkerFailedError`. Then a
    `collective_rpc("reset")` is due, which makes the ranks forget all requests and meet again;
    until it, ranks in processes raise the same for every call. It is due as well after an exception
    in the middle of a method, such as Ctrl-C: the ranks may or may not have run the call.

    What the ranks survive: on CPUs, any exception on any of them. On GPUs, one that all of them
    raise at the same place, such as a bad argument; if only some raise it, the others wait for them
    in NCCL, do not answer the reset, and the engine ends.
    """

    max_concurrent_batches: int
    """How many steps the core should have in flight: 1, 2 with `async_scheduling`, or one for
    each stage.
    """

    @abstractmethod
    def __init__(self, settings: WorkerSettings) -> None:
        """Start the ranks, which load their models."""

    @abstractmethod
    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's `Worker`; return the results in rank order."""

    def start_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start one step on all ranks; return a future of the sampling rank's output. In vLLM:
        `execute_model(non_block=True)`.

        Several steps may be in flight. They run in order, each with the tokens sampled by those
        before it, which the caller need not know yet. A step's exceptions are raised by its future.

        If any of its requests has a grammar, the step is not over: it ends with `sample_tokens`,
        which must come next.
        """
        return self._start("execute_model", scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput) -> Future[ModelRunnerOutput]:
        """Finish the step that `start_model` began, on all ranks: sample tokens that fit the
        grammars.

        Return a future of the output of the rank that samples.
        """
        return self._start("sample_tokens", grammar_output)

    @abstractmethod
    def _start(self, method: str, argument: SchedulerOutput | GrammarOutput) -> Future[ModelRunnerOutput]:
        """Start this method of `Worker` on all ranks; return a future of the output of the rank
        that samples.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the processes that were started, if any; a second call does nothing."""
