"""A rank of the engine, in its own process, that raises where a test tells it to."""

from typing import Any

from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.worker import Worker, join_group

PLACES = ("before", "in the layers", "sampling", "after")


class FailingWorker(Worker):
    """A worker that fails once at the place that `fail_in` names."""

    place = ""

    def fail_in(self, place: str, ranks: list[int]) -> None:
        self.place = place if self.group.world_rank in ranks else ""

    def keep_drafts(self, keeps: bool) -> None:
        self.runner.draft_tokens_handler.keeps_drafts = keeps

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._fail_if("before")
        if self.place == "in the layers":
            self._break("all_reduce", 2)
        if self.place == "sampling":
            self._break("broadcast", 1)
        output = super().execute_model(scheduler_output)
        self._fail_if("after")
        return output

    def _fail_if(self, place: str) -> None:
        if self.place == place:
            self.place = ""
            raise KeyError("told to fail")

    def _break(self, name: str, number: int) -> None:
        """Make the `number`-th call of a group method raise instead of joining the other ranks."""
        place, left, method = self.place, number, getattr(self.group, name)

        def breaks(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                delattr(self.group, name)
                self._fail_if(place)
            return method(*arguments)

        setattr(self.group, name, breaks)


def failing_worker_of_rank(settings: WorkerSettings, address: tuple[str, int], rank: int) -> Worker:
    return FailingWorker(settings, join_group(settings, address, rank))
