"""A worker for tests, with a tier below its cache and no model: it copies what slots hold at the
worst moment.
"""

from dataclasses import dataclass
from random import Random
from typing import Any, cast

from core.worker_double import NextToken, WorkerDouble

from minivllm.core.kv_connector import KVConnectorOutput
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.kv_connector.offload.metadata import BlockCopy, OffloadMetadata


@dataclass
class UnderWay:
    """A request's load (`name` is its id) or a store (`name` is its number) that ends after
    `num_steps` more steps.

    `is_late`: it moves its bytes at its end, not at once.
    """

    job: BlockCopy
    num_steps: int
    is_late: bool
    name: str | int

    @property
    def is_store(self) -> bool:
        return isinstance(self.name, int)


class OffloadingWorkerDouble(WorkerDouble):
    """A worker whose copies take up to `most_steps` steps, drawn from `rng`."""

    def __init__(self, block_size: int, next_token: NextToken, rng: Random, most_steps: int = 3) -> None:
        super().__init__(block_size, next_token)
        self.rng, self.most_steps = rng, most_steps
        self.host: dict[int, list[Any]] = {}
        self.copies: list[UnderWay] = []
        self.num_flushes = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = cast(OffloadMetadata, output.kv_connector_metadata)
        self.told: list[int] = []
        connector_output = KVConnectorOutput()
        if metadata.need_flush:
            self.num_flushes += 1
            for copy in [copy for copy in self.copies if copy.is_store]:
                self._end(copy, connector_output)
        for name, load in metadata.loads.items():
            self._begin(load, name)
        done = super().execute(output)
        for number, store in metadata.stores.items():
            self._begin(store, number)
        for copy in list(self.copies):
            copy.num_steps -= 1
            if copy.num_steps <= 0:
                self._end(copy, connector_output)
        connector_output.kv_connector_worker_meta = [self.told] if self.told else None
        done.kv_connector_output = None if connector_output.is_empty() else connector_output
        return done

    def reset(self) -> None:
        super().reset()
        for copy in self.copies:
            if copy.is_late and copy.is_store:
                self._move(copy)
        self.copies.clear()

    def _begin(self, job: BlockCopy, name: str | int) -> None:
        copy = UnderWay(job, self.rng.randint(1, self.most_steps), self.rng.random() < 0.5, name)
        self.copies.append(copy)
        if not copy.is_late:
            self._move(copy)

    def _end(self, copy: UnderWay, output: KVConnectorOutput) -> None:
        if copy.is_late:
            self._move(copy)
        self.copies.remove(copy)
        if isinstance(copy.name, int):
            self.told.append(copy.name)
        else:
            output.finished_recving.add(copy.name)

    def _move(self, copy: UnderWay) -> None:
        for block_id, cpu_block_id in zip(copy.job.block_ids, copy.job.cpu_block_ids, strict=True):
            places = [(block_id, offset) for offset in range(self.block_size)]
            if copy.is_store:
                self.host[cpu_block_id] = [self.slots.get(place) for place in places]
            else:
                assert None not in self.host[cpu_block_id], "what was stored was not computed"
                self.slots |= dict(zip(places, self.host[cpu_block_id], strict=True))
