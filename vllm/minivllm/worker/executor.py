"""Where the ranks run: the only one in the engine's process, or each of several in a process of its own.

Every rank gets the same calls in the same order. Several ranks are all workers, rank 0 too: so the engine's process
never waits inside a sum, sees at once when a rank ends, and can end the others, wherever they are stuck.

In vLLM v0.33.0: `vllm/v1/executor/abstract.py` (`Executor`), `uniproc_executor.py` (`UniProcExecutor`),
`multiproc_executor.py` (`MultiprocExecutor`).
"""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import torch

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm.worker.rank_processes import RankProcesses
from minivllm.worker.worker import Worker, WorkerSettings, worker_of_rank


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


class MultiprocExecutor:
    """A process for each rank."""

    def __init__(self, settings: WorkerSettings) -> None:
        check_devices(settings)
        self._sampled: dict[str, list[int]] = {}
        folder = tempfile.mkdtemp(prefix="minivllm-")  # the ranks look into it as long as they live
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        meeting = str(Path(folder) / "ranks")
        self.ranks = RankProcesses(worker_of_rank, (settings, meeting), settings.tensor_parallel_size)

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """As `Executor`."""
        return self.ranks.call(method, *arguments)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """As `Executor`."""
        sampled, self._sampled = self._sampled, {}  # each is told once, also where this step is interrupted
        output: ModelRunnerOutput = self.ranks.call_for_one("execute_model", scheduler_output, sampled)
        self._sampled = output.sampled_token_ids
        return output

    def take_draft_token_ids(self) -> dict[str, list[int]]:
        """As `Executor`."""
        return self.ranks.call_for_one("take_draft_token_ids")

    def shutdown(self) -> None:
        """As `Executor`."""
        self.ranks.shutdown()


def check_devices(settings: WorkerSettings) -> None:
    """Refuses more ranks than there are GPUs.

    Raises:
        MinivllmError: as said.
    """
    size = settings.tensor_parallel_size
    if settings.device == "cuda" and size > torch.cuda.device_count():
        raise MinivllmError(
            f"tensor_parallel_size is {size}, and each rank needs a GPU of its own: "
            f'there are {torch.cuda.device_count()} here; use at most so many, or device="cpu"'
        )
