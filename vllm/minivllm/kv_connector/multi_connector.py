"""Several connectors as one: the first that has something loads, all of them save.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py` (`MultiConnector`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minivllm.config import KVTransferConfig
from minivllm.core.kv_connector import (
    KVCaches,
    KVConnectorBase_V1,
    KVConnectorConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVTransferParams,
    joined_stats,
)
from minivllm.errors import MinivllmError
from minivllm.kv_connector.factory import create_connector

if TYPE_CHECKING:
    import torch

    from minivllm.core.block_pool import BlockPool, KVCacheBlock
    from minivllm.core.output import SchedulerOutput
    from minivllm.core.request import Request


@dataclass
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """What each connector tells its workers' side, in their order.

    `extra_async_saves`: of requests that several connectors send, how many besides the first.
    """

    metadata: list[KVConnectorMetadata]
    extra_async_saves: dict[str, int] = field(default_factory=dict)


class MultiConnector(KVConnectorBase_V1):
    """`connectors` in `kv_connector_extra_config` is a list of what `kv_transfer_config` is for each."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Creates them all.

        Raises:
            MinivllmError: there are none, or one cannot work with these settings.
        """
        super().__init__(config, role)
        own = config.kv_transfer_config
        given = own.get_from_extra_config("connectors")
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise MinivllmError(
                f"connectors is {given!r}; MultiConnector needs a list of connectors, as in "
                '{"kv_connector_extra_config": {"connectors": [{"kv_connector": "ExampleConnector", …}]}}'
            )
        self.connectors: list[KVConnectorBase_V1] = []
        for one in given:
            inherited = {"engine_id": own.engine_id, "kv_load_failure_policy": own.kv_load_failure_policy}
            settings = KVTransferConfig.of({**inherited, **one} if isinstance(one, Mapping) else one)
            assert settings is not None
            self.connectors.append(create_connector(replace(config, kv_transfer_config=settings), role))
        self._loads_by: dict[str, KVConnectorBase_V1] = {}
        self._delays: dict[str, int] = {}  # on the scheduler's side: how many send a request
        self._extra_async_saves: dict[str, int] = {}  # of these, what the ranks have not been told
        self._unsent: Counter[str] = Counter()

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """See `KVConnectorBase_V1`, as for all methods here: asks or tells each connector."""
        for one in self.connectors:
            one.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Gives each its own part."""
        assert isinstance(connector_metadata, MultiKVConnectorMetadata)
        self._unsent.update(connector_metadata.extra_async_saves)
        for one, metadata in zip(self.connectors, connector_metadata.metadata, strict=True):
            one.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        """All forget their parts."""
        for one in self.connectors:
            one.clear_connector_metadata()

    def handle_preemptions(self, connector_metadata: KVConnectorMetadata) -> None:
        """Gives each its own part."""
        assert isinstance(connector_metadata, MultiKVConnectorMetadata)
        for one, metadata in zip(self.connectors, connector_metadata.metadata, strict=True):
            one.handle_preemptions(metadata)

    def start_load_kv(self) -> None:
        """All begin; only those that were told to have something to load."""
        for one in self.connectors:
            one.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for all."""
        for one in self.connectors:
            one.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: "tuple[torch.Tensor, ...]", attn_metadata: Any) -> None:
        """All save."""
        for one in self.connectors:
            one.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        """Waits for all."""
        for one in self.connectors:
            one.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """A request is sent when all that send it have done so."""
        sent: set[str] = set()
        received: set[str] = set()
        for one in self.connectors:
            sent_by_one, received_by_one = one.get_finished(finished_req_ids)
            received |= received_by_one
            for name in sent_by_one:
                if self._unsent[name] > 0:
                    self._unsent[name] -= 1
                else:
                    sent.add(name)
                    self._unsent.pop(name, None)
        return sent, received

    def get_failed_recving(self) -> set[str]:
        """Those of all."""
        return set().union(*(one.get_failed_recving() for one in self.connectors))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those of all."""
        return set().union(*(one.get_block_ids_with_load_errors() for one in self.connectors))

    def get_kv_connector_stats(self) -> dict[str, Any] | None:
        """Those of all, as one."""
        return joined_stats([one.get_kv_connector_stats() for one in self.connectors])

    def build_connector_worker_meta(self) -> list[Any] | None:
        """A list with what each has to tell."""
        metas = [one.build_connector_worker_meta() for one in self.connectors]
        return None if all(meta is None for meta in metas) else metas

    def get_handshake_metadata(self) -> list[Any]:
        """A list with each one's."""
        return [one.get_handshake_metadata() for one in self.connectors]

    def reset(self) -> None:
        """All give up what they load. How many send a request is told again."""
        self._unsent.clear()
        for one in self.connectors:
            one.reset()

    # The scheduler's side

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Gives each its own of all ranks."""
        for place, one in enumerate(self.connectors):
            one.set_xfer_handshake_metadata({rank: of_rank[place] for rank, of_rank in metadata.items()})

    def bind_gpu_block_pool(self, block_pool: "BlockPool") -> None:
        """Tells all."""
        for one in self.connectors:
            one.bind_gpu_block_pool(block_pool)

    def on_new_request(self, request: "Request") -> None:
        """Tells all."""
        for one in self.connectors:
            one.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks in order. The first that has any tokens loads; but nobody does while one does not know yet."""
        self._loads_by.pop(request.request_id, None)
        chosen = (0, False)
        for one in self.connectors:
            num_tokens, loads_async = one.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                self._loads_by.pop(request.request_id, None)
                return None, False
            if num_tokens > 0 and request.request_id not in self._loads_by:
                self._loads_by[request.request_id] = one
                chosen = num_tokens, loads_async
        return chosen

    def update_state_after_alloc(
        self, request: "Request", blocks: "Sequence[KVCacheBlock]", num_external_tokens: int
    ) -> None:
        """Tells the one that loads; the others, that they load nothing."""
        chosen = self._loads_by.pop(request.request_id, None)
        for one in self.connectors:
            one.update_state_after_alloc(request, blocks, num_external_tokens if one is chosen else 0)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> MultiKVConnectorMetadata:
        """All parts."""
        parts = [one.build_connector_meta(scheduler_output) for one in self.connectors]
        extra, self._extra_async_saves = self._extra_async_saves, {}
        return MultiKVConnectorMetadata(parts, extra)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tells all, each only its own words."""
        for name in connector_output.finished_sending:
            self._delays.pop(name, None)
        metas = connector_output.kv_connector_worker_meta
        for place, one in enumerate(self.connectors):
            own = [meta[place] for meta in metas or () if meta[place] is not None]
            one.update_connector_output(replace(connector_output, kv_connector_worker_meta=own or None))

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """The blocks stay while any connector needs them; the client is told what the first has to tell."""
        self._loads_by.pop(request.request_id, None)
        answers = [one.request_finished(request, block_ids) for one in self.connectors]
        num_delays = sum(delays for delays, _ in answers)
        if num_delays > 1:
            self._delays[request.request_id] = num_delays
            self._extra_async_saves[request.request_id] = num_delays - 1
        return num_delays > 0, next((params for _, params in answers if params is not None), None)

    def has_pending_block_frees(self) -> bool:
        """Whether any has."""
        return any(one.has_pending_block_frees() for one in self.connectors)

    def release_gpu_blocks(self) -> bool:
        """All give back what they can."""
        freed = [one.release_gpu_blocks() for one in self.connectors]
        return any(freed)

    def take_stats(self) -> dict[str, Any] | None:
        """Those of all, as one."""
        return joined_stats([one.take_stats() for one in self.connectors])

    def tier_state(self) -> dict[str, int] | None:
        """That of the first that has a tier."""
        return next((known for one in self.connectors if (known := one.tier_state()) is not None), None)

    def reset_cache(self) -> bool | None:
        """Whether all that had something to forget did."""
        done = [one.reset_cache() for one in self.connectors]
        return None if all(answer is None for answer in done) else False not in done

    def start_over(self) -> None:
        """Tells all, and will tell the ranks again how many send a request."""
        self._extra_async_saves = {name: count - 1 for name, count in self._delays.items()}
        for one in self.connectors:
            one.start_over()

    # Both sides

    def shutdown(self) -> None:
        """Ends all."""
        for one in self.connectors:
            one.shutdown()
