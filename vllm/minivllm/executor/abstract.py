"""Where the ranks run: the only one in the engine's process, or each in a process of its own.

Every rank gets the same calls in the same order. In vLLM v0.33.0: `vllm/v1/executor/abstract.py` (`Executor`).
"""

from concurrent.futures import Future
from typing import Any, Literal, Protocol, overload

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.worker import WorkerSettings


class Executor(Protocol):
    """What the engine's core knows of the ranks. Every method raises `WorkerDiedError` where one has ended.

    An exception in the middle of a method, Ctrl-C for example, leaves the executor usable; the ranks may have done
    what was asked or not. `collective_rpc("reset")` then makes them forget all requests.
    """

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of every rank's `Worker`; the results in order of rank."""
        ...

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
        """One step on all ranks; what rank 0 sampled. With `non_block` a future of it, the step on its way.

        Several steps may be on their way. Each is executed after those before it, with the tokens that they sampled,
        which the caller need not know yet. Errors of a step come from its future.
        """
        ...

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """Rank 0's drafts for what comes after the last step's tokens, by request id; once."""
        ...

    def shutdown(self) -> None:
        """Ends what was started; a second time it does nothing."""
        ...


EXECUTORS: dict[str, type[UniprocExecutor] | type[MultiprocExecutor]] = {
    "mp": MultiprocExecutor,
    "uni": UniprocExecutor,
}
"""By `distributed_executor_backend`."""


def get_class(backend: str | None, tensor_parallel_size: int) -> type[UniprocExecutor] | type[MultiprocExecutor]:
    """The executor of that name; for None, "uni" where there is one rank and "mp" where there are more.

    Raises:
        MinivllmError: there is none of that name, or it cannot run so many ranks.
    """
    if backend is None:
        backend = "uni" if tensor_parallel_size == 1 else "mp"
    if backend not in tuple(EXECUTORS):
        names = ", ".join(f'"{name}"' for name in EXECUTORS)
        raise MinivllmError(f"there is no distributed_executor_backend {backend!r}: use one of {names}, or None")
    executor_class = EXECUTORS[backend]
    most = executor_class.max_tensor_parallel_size
    if most is not None and tensor_parallel_size > most:
        raise MinivllmError(
            f'distributed_executor_backend "{backend}" runs {most} rank, but tensor_parallel_size is '
            f'{tensor_parallel_size}: use "mp"'
        )
    return executor_class


def make_executor(settings: WorkerSettings, backend: str | None = None) -> UniprocExecutor | MultiprocExecutor:
    """The executor of that name (`get_class`), its ranks' models loaded.

    Raises:
        MinivllmError: no such executor, what any rank refuses, or more ranks than GPUs.
        WorkerDiedError: a rank ended before it was ready.
    """
    return get_class(backend, settings.tensor_parallel_size)(settings)
