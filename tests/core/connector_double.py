"""A KV connector without a network, for tests: both its sides, and a worker that tracks what
invalid blocks spoil.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from core.worker_double import NextToken, WorkerDouble, prefixes_of

from minivllm.config import KVTransferConfig
from minivllm.core import kv_connector
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.request import Request
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput

INVALID = -1
"""What a slot holds that should have been loaded and was not, or was computed from such slots."""


def config_double(block_size: int = 4, **settings: Any) -> kv_connector.KVConnectorConfig:
    return kv_connector.KVConnectorConfig(
        kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", **settings), model_fingerprint="",
        block_size=block_size, num_gpu_blocks=11, kv_cache_dtype="float32",
    )  # fmt: skip


@dataclass
class Plan:
    """The double's plan for one request: the first `num_tokens` of its prompt can be loaded.

    `num_unknown`: how many lookups are answered with "not known yet". `load_steps`: how many steps
    an asynchronous load takes; 0 means within the step. `fails`: indices of the blocks to load that
    become invalid; None means all. `send_steps`: how many steps its blocks are kept after it ends;
    0 means not at all.
    """

    num_tokens: int = 0
    num_unknown: int = 0
    load_steps: int = 0
    fails: tuple[int, ...] | None = ()
    send_steps: int = 0


@dataclass
class Load:
    """A load of a request's tokens `start` to `stop` into its blocks."""

    request: Request
    block_ids: list[int]
    start: int
    stop: int
    num_steps: int
    loads_async: bool
    fails: tuple[int, ...] | None


@dataclass
class Metadata(kv_connector.KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    sends: dict[str, int] = field(default_factory=dict)


class ConnectorDouble(kv_connector.KVConnectorBase_V1):
    """The connector's scheduler side, which follows `plans` by request id and does nothing for
    other requests.
    """

    def __init__(self, plans: dict[str, Plan], block_size: int = 4, **settings: Any) -> None:
        super().__init__(config_double(block_size, **settings), kv_connector.KVConnectorRole.SCHEDULER)
        self.plans, self.metadata = plans, Metadata()
        self.sends: dict[str, int] = {}
        self.ended: list[str] = []
        self.asked: dict[str, int] = {}
        self.promised: dict[str, bool] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        plan = self.plans.get(request.request_id, Plan())
        asked = self.asked[request.request_id] = self.asked.get(request.request_id, 0) + 1
        if asked <= plan.num_unknown:
            return None, False
        count = max(0, plan.num_tokens - num_computed_tokens)  # the scheduler leaves out the last token
        self.promised[request.request_id] = plan.load_steps > 0 and count > 0
        return count, self.promised[request.request_id]

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        if not num_external_tokens:
            return
        plan, size = self.plans[request.request_id], self.config.block_size
        loads_async = self.promised[request.request_id]
        stop = plan.num_tokens if loads_async else min(plan.num_tokens, request.num_tokens - 1)
        start = stop - num_external_tokens
        wanted = blocks[start // size : -(-stop // size)]
        assert not loads_async or all(block.block_hash is None for block in wanted), "can be found before it is there"
        block_ids = [block.block_id for block in wanted]
        load = Load(request, block_ids, start, stop, plan.load_steps * loads_async, loads_async, plan.fails)
        self.metadata.loads.append(load)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> kv_connector.KVConnectorMetadata:
        metadata, self.metadata = self.metadata, Metadata()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.ended.append(request.request_id)
        steps = self.plans.get(request.request_id, Plan()).send_steps
        if not steps or not block_ids:
            return False, None
        self.metadata.sends[request.request_id] = self.sends[request.request_id] = steps
        return True, {"remote_block_ids": block_ids}

    def update_connector_output(self, connector_output: kv_connector.KVConnectorOutput) -> None:
        for name in connector_output.finished_sending:
            self.sends.pop(name, None)

    def start_over(self) -> None:
        self.metadata = Metadata(sends=dict(self.sends))


class RemoteWorkerDouble(WorkerDouble):
    """A worker with the connector's worker side. Whatever is computed from invalid slots is
    invalid, and its tokens are nonsense.
    """

    def __init__(self, block_size: int, next_token: NextToken) -> None:
        super().__init__(block_size, next_token)
        self.loading: list[Load] = []
        self.sending: dict[str, int] = {}
        self.spoiled: set[str] = set()
        self.rng = Random(0)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = cast(Metadata, output.kv_connector_metadata)
        connector_output = kv_connector.KVConnectorOutput()
        self.spoiled = set()
        for load in metadata.loads:
            (self.loading.append if load.num_steps else lambda item: self.arrive(item, connector_output))(load)
        self.sending |= metadata.sends
        done = super().execute(output)
        for load in list(self.loading):
            load.num_steps -= 1
            if not load.num_steps:
                self.loading.remove(load)
                self.arrive(load, connector_output)
                connector_output.finished_recving.add(load.request.request_id)
        for name in list(self.sending):
            self.sending[name] -= 1
            if self.sending[name] <= 0:
                del self.sending[name]
                connector_output.finished_sending.add(name)
        done.kv_connector_output = None if connector_output.is_empty() else connector_output
        return done

    def reset(self) -> None:
        super().reset()
        self.loading.clear()

    def arrive(self, load: Load, output: kv_connector.KVConnectorOutput) -> None:
        """Fill the blocks of a load, except those that are planned to fail."""
        prefixes = prefixes_of(load.request.sampling_params, load.request.all_token_ids[: load.stop])
        broken = range(len(load.block_ids)) if load.fails is None else load.fails
        first = load.start // self.block_size
        for place, block_id in enumerate(load.block_ids):
            for offset in range(self.block_size):
                position = (first + place) * self.block_size + offset
                if load.start <= position < load.stop:
                    self.slots[block_id, offset] = INVALID if place in broken else prefixes[position]
            if place in broken and not load.loads_async:
                output.invalid_block_ids.add(block_id)
        if load.loads_async and broken:
            output.failed_recving.add(load.request.request_id)

    def _write(self, request_id: str, start: int, count: int, drafts: list[int]) -> None:
        prefixes = self._prefixes(request_id, start + count, drafts)
        reads = (self.slots.get(self._slot(request_id, position)) == prefixes[position] for position in range(start))
        if not all(reads):
            self.spoiled.add(request_id)
        for position in range(start, start + count):
            spoiled = request_id in self.spoiled
            self.slots[self._slot(request_id, position)] = INVALID if spoiled else prefixes[position]

    def _check_reads(self, request_id: str, stop: int, drafts: list[int]) -> None:
        if request_id not in self.spoiled:
            super()._check_reads(request_id, stop, drafts)

    def _sample(self, request_id: str, stop: int, drafts: list[int]) -> list[int]:
        sampled = super()._sample(request_id, stop, drafts)
        return [self.rng.randrange(4) for _ in sampled[:1]] if request_id in self.spoiled else sampled
