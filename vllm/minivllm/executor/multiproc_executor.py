"""A process for each rank. In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py` (`MultiprocExecutor`).

Rank 0 too is a worker: so the engine's process never waits inside a sum, sees at once when a rank ends, and can end the
others, wherever they are stuck.
"""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm.executor.rank_processes import RankProcesses
from minivllm.worker.worker import WorkerSettings, worker_of_rank


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
