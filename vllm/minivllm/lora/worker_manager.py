"""A rank's adapters: they are read from their folders when a step needs them, and each of the
step's rows gets its slot.

In vLLM v0.33.0: `vllm/lora/worker_manager.py` (`LRUCacheWorkerLoRAManager`),
`vllm/v1/worker/lora_model_runner_mixin.py` (`LoRAModelRunnerMixin.set_active_loras`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minivllm.config import LoRAConfig
from minivllm.core.adapter_slots import AdapterSlots
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import AdapterError, MinivllmError
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.lora.layers import LoRAStep
from minivllm.lora.lora_model import fingerprint_of, read_adapter
from minivllm.lora.model_manager import LRUCacheLoRAModelManager
from minivllm.models.decoder import Decoder


class NoLoRA:
    """The stand-in for `LRUCacheWorkerLoRAManager` when adapters are disabled: no row has a slot."""

    slot_bytes = 0
    lora_index_to_id: Sequence[int | None] = ()

    def slots_of_tokens(
        self, requests: Mapping[int, LoRARequest], rows: np.ndarray, query_start_loc: np.ndarray
    ) -> None:
        """Return None: no token has an adapter."""

    def set_rows(self, slots: np.ndarray | None, wanted: np.ndarray | None = None) -> None:
        """Do nothing: no linear reads slots."""

    def list_adapters(self) -> list[int]:
        return []

    def for_graphs(self, most_rows: int) -> None:
        """Return None: graphs contain no launches for adapters."""


class LRUCacheWorkerLoRAManager:
    """The worker's adapters, loaded for the requests that name them. `num_loads` counts the folders
    that were read.
    """

    def __init__(
        self,
        model: Decoder,
        config: LoRAConfig,
        max_rows: int,
        make_slots: Callable[[int], AdapterSlots] = AdapterSlots,
    ) -> None:
        """Allocate the slots. `max_rows` is the number of rows of the largest step; `make_slots` is
        called with `max_loras`.
        """
        self.config = config
        self.manager = LRUCacheLoRAModelManager(model, config, make_slots(config.max_loras))
        self.slot_bytes = self.manager.slot_bytes
        self.num_loads = 0
        new_meta = (max_rows, config.max_loras, self.manager.device)
        # All rows of a step, and those that the last layer keeps.
        self._metas = LoRAKernelMeta(*new_meta), LoRAKernelMeta(*new_meta)

    def add_adapter(self, lora_request: LoRARequest) -> str:
        """Read an adapter into host memory, or replace the one with this id; return its
        fingerprint.

        If the request has a fingerprint, only that adapter is accepted: not a folder that has
        changed, nor, with `load_inplace`, another adapter while requests use the old one.

        Raises:
            MinivllmError: the adapter cannot be served, has changed, or does not fit.
        """
        pairs = read_adapter(lora_request.lora_path, self.config.max_lora_rank, self.manager.shape_of)
        # The scheduler hashes prefixes with it, so it must stand for exactly these numbers.
        fingerprint = fingerprint_of(pairs, self.manager.dtype)
        if lora_request.fingerprint not in ("", fingerprint):
            raise MinivllmError(_why_not(lora_request))
        self.manager.add_adapter(lora_request.lora_int_id, self.manager.share_of(pairs))
        self.num_loads += 1
        return fingerprint

    @property
    def lora_index_to_id(self) -> list[int | None]:
        """Return the id of the adapter in each slot; None marks a free one."""
        return self.manager.lora_index_to_id

    def list_adapters(self) -> list[int]:
        """Return the ids of the adapters in host memory."""
        return self.manager.list_adapters()

    def slots_of_tokens(
        self, requests: Mapping[int, LoRARequest], rows: np.ndarray, query_start_loc: np.ndarray
    ) -> np.ndarray | None:
        """Give all adapters slots; return the slot of each token [tokens], -1 for none, or None if
        no token has one.

        `requests`: the adapters by row of the batch. `rows` [requests] and `query_start_loc`
        [requests + 1]: the step's.

        Raises:
            AdapterError: an adapter can no longer be read.
        """
        by_request = [requests.get(row) for row in rows.tolist()] if requests else []
        distinct = {request.lora_int_id: request for request in by_request if request is not None}
        if not distinct:
            return None
        slot_of = self.set_active_adapters(distinct.values())
        slots = np.array([slot_of[request.lora_int_id] if request else -1 for request in by_request], np.int32)
        return np.repeat(slots, np.diff(query_start_loc))  # [requests] to [tokens]

    def set_active_adapters(self, requests: Collection[LoRARequest]) -> dict[int, int]:
        """Give each of a step's adapters a slot; return the slots by id.

        Raises:
            AdapterError: an adapter can no longer be read.
        """
        slots: dict[int, int] = {}
        in_slots = self.manager.lora_index_to_id
        registered = self.manager.registered
        # Adapters that are in place come first, so that none of them is evicted for the others.

        def absence(request: LoRARequest) -> tuple[bool, bool]:
            return request.lora_int_id not in in_slots, request.lora_int_id not in registered

        for request in sorted(requests, key=absence):
            lora_id = request.lora_int_id
            try:
                if lora_id not in registered:
                    self.add_adapter(request)
                slots[lora_id] = self.manager.activate_adapter(lora_id)
            except MinivllmError as error:
                raise AdapterError(f"the adapter {request.lora_name!r} cannot be used: {error}", lora_id) from error
        return slots

    def set_rows(self, slots: np.ndarray | None, wanted: np.ndarray | None = None) -> None:
        """Set the slot of each row of the step for the linears [rows], -1 for none; None if no row
        has an adapter.

        `wanted`: the rows with which the last layer continues, or None for all.
        """
        step = self.manager.step
        if slots is None:
            step.metas = ()
            return
        self._metas[0].prepare(slots)
        step.metas = self._metas[:1]
        if wanted is not None:
            self._metas[1].prepare(slots[wanted])
            step.metas = self._metas

    def for_graphs(self, most_rows: int) -> "LoRAOfGraphs":
        """Return the row slots that CUDA graphs of up to `most_rows` rows read instead."""
        meta = LoRAKernelMeta(most_rows, self.config.max_loras, self.manager.device)
        return LoRAOfGraphs(self.manager.step, meta)


LoRAManager = LRUCacheWorkerLoRAManager | NoLoRA


def make_lora_manager(
    model: Decoder, config: LoRAConfig | None, max_rows: int, make_slots: Callable[[int], AdapterSlots] | None
) -> LoRAManager:
    """Return the manager of a rank's adapters; without a `config`, a stand-in that does nothing."""
    if config is None:
        return NoLoRA()
    return LRUCacheWorkerLoRAManager(model, config, max_rows, make_slots or AdapterSlots)


def _why_not(request: LoRARequest) -> str:
    if request.load_inplace:
        return (
            f"requests use the adapter {request.lora_name!r} (lora_int_id {request.lora_int_id}): wait until they have "
            "ended before another one takes its place, or give that one an id of its own"
        )
    return (
        f"the files in {request.lora_path} differ from those that were added: restore them, or add it again with "
        "load_inplace"
    )


@dataclass(frozen=True, eq=False)
class LoRAOfGraphs:
    """The rows' slots at fixed addresses, and launches that do not depend on how many slots are in
    use.
    """

    step: LoRAStep
    meta: LoRAKernelMeta

    def around(self, forward: Callable[[], None], rows: int) -> Callable[[], None]:
        """Return `forward` with launches for the adapters of `rows` rows."""

        def with_adapters() -> None:
            assert self.meta.num_rows == rows  # loaded for a graph of this size
            self.step.metas = (self.meta,)
            self.step.fixed_grid = True
            try:
                forward()
            finally:
                self.step.metas = ()
                self.step.fixed_grid = False

        return with_adapters

    def load(self, slots: np.ndarray, rows: int) -> None:
        """Load the slots of a step [tokens]; the padding rows after them have none."""
        # Padding has no adapter.
        self.meta.prepare(np.concatenate((slots, np.full(rows - len(slots), -1, np.int32))))
