"""Keep track of a core's adapters. The ranks read them; the scheduler counts those that run.

An adapter is loaded when it is added, or when the first request names it, so that a request for an
adapter that cannot be served is refused. An adapter that is removed while requests use it is
dropped when the last of them has ended.

In vLLM v0.33.0: `vllm/v1/engine/core.py` (`EngineCore.add_lora`, `remove_lora`, `list_loras`,
`pin_lora`). It removes an adapter at once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minivllm.core.lora_request import LoRARequest
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm.executor.abstract import Executor


class AdapterRefused(MinivllmError):
    """Raised when an adapter cannot be served as requested. Nothing has changed, not even in the
    ranks.
    """


class LoRARegistry:
    """Adapters by id, with fingerprints of the weights that were loaded, which identify the
    adapters' cached blocks.

    An adapter evicted from host memory is loaded from its folder again, and refused if its files
    have changed: a folder that is rewritten must be added again (`load_inplace`).
    """

    def __init__(self, executor: Executor, scheduler: Callable[[], Scheduler]) -> None:
        """Take the executor, and a function that returns the current scheduler."""
        self._executor = executor
        self._scheduler = scheduler
        self._adapters: dict[int, LoRARequest] = {}
        self._leaving: set[int] = set()
        self._unreadable: set[int] = set()
        self.slots: list[int | None] = []
        """The adapter in each of the ranks' slots, by id, after the last step."""

    def add(self, lora_request: LoRARequest) -> LoRARequest:
        """Return the adapter under the name that requests must use. It is loaded if it is unknown
        or `load_inplace` is set.

        Raises:
            AdapterRefused: it cannot be served, its id is taken, or it would take the place
                of one in use.
        """
        # Two requests for the same adapter may differ in these, and are equal for us.
        adapter = replace(lora_request, load_inplace=False, fingerprint="")
        lora_id = adapter.lora_int_id
        known = self._adapters.get(lora_id)
        if known is not None and not lora_request.load_inplace:
            if replace(known, fingerprint="") != adapter:
                raise AdapterRefused(
                    f"lora_int_id {lora_id} is that of {known.lora_name!r} in {known.lora_path}: give "
                    f"{adapter.lora_name!r} another id, or set load_inplace"
                )
            added = known
            if lora_id in self._unreadable:
                self._read(known, None)
        else:
            added = replace(adapter, fingerprint=self._read(adapter, known))
        self._adapters[lora_id] = added
        self._unreadable.discard(lora_id)
        self._leaving.discard(lora_id)
        return added

    def add_lora(self, lora_request: LoRARequest | dict[str, Any]) -> bool:
        """Load an adapter from its folder into host memory, unless it is already there; with
        `load_inplace`, load it again. From another process it comes as a dictionary.

        Raises:
            MinivllmError: it cannot be served.
        """
        self.add(lora_request if isinstance(lora_request, LoRARequest) else LoRARequest(**lora_request))
        return True

    def _read(self, adapter: LoRARequest, known: LoRARequest | None) -> str:
        """Have all ranks load an adapter, and return its fingerprint. While requests use `known`,
        refuse files with any other weights.
        """
        # Running requests hold blocks that were computed with the known weights.
        if known is not None and known.lora_int_id in self._used():
            adapter = replace(adapter, load_inplace=True, fingerprint=known.fingerprint)
        # Each rank reads the files by itself, so they must have read the same.
        answers = self._executor.collective_rpc("add_lora", adapter)
        refusals = [refusal for _, refusal in answers if refusal]
        fingerprints = {fingerprint for fingerprint, _ in answers if fingerprint}
        if not refusals and len(fingerprints) == 1:
            return fingerprints.pop()
        if fingerprints:  # the ranks have read different things
            self._executor.collective_rpc("remove_lora", adapter.lora_int_id)
            refusals = [f"the files in {adapter.lora_path} changed while they were read: add the adapter once more"]
        raise AdapterRefused(refusals[0])

    def _used(self) -> set[int]:
        requests = self._scheduler().requests.values()
        return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter, or mark it to be removed after its last request; return whether it was
        loaded.
        """
        if lora_id not in self._adapters or lora_id in self._leaving:
            return False
        self._leaving.add(lora_id)
        self.forget_unused()
        return True

    def could_not_be_read(self, lora_id: int) -> None:
        """Mark an adapter that made a step fail as unreadable, so that its next request reloads it
        before it is scheduled.
        """
        self._unreadable.add(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in a slot until it is removed, whether or not any request uses it.

        Raises:
            AdapterRefused: it was not added, or no other adapter could run beside it and those that run
                now.
        """
        if lora_id not in self._adapters or lora_id in self._leaving:
            raise AdapterRefused(f"there is no adapter {lora_id} to pin; add it first")
        used = self._scheduler().running_loras() | {lora_id}
        most = self._scheduler().config.max_loras
        if len(used) > most:
            raise AdapterRefused(
                f"the adapter {lora_id} cannot be pinned: all max_loras = {most} slots are pinned, or in use now"
            )
        # Each rank answers with the reason why it refuses, or None.
        refusals = list(filter(None, self._executor.collective_rpc("pin_lora", self._adapters[lora_id])))
        if refusals:
            raise AdapterRefused(refusals[0])
        self._scheduler().pinned_loras.add(lora_id)
        self.slots = self._executor.collective_rpc("lora_slots")[0]
        return True

    def list_loras(self) -> list[int]:
        """Return the ids of the adapters in the ranks' host memory."""
        return sorted(set(self._executor.collective_rpc("list_loras")[0]) - self._leaving)

    def forget_unused(self) -> None:
        """Drop removed adapters that no request uses any more."""
        unused = self._leaving - self._used() if self._leaving else ()
        for lora_id in unused:
            self._executor.collective_rpc("remove_lora", lora_id)
            self._scheduler().pinned_loras.discard(lora_id)  # not earlier: the ranks have it pinned until now
            self._leaving.discard(lora_id)
            self._unreadable.discard(lora_id)
            del self._adapters[lora_id]

    def named_slots(self) -> list[tuple[str, bool]]:
        """Return what each slot holds: an adapter's name ("": none), and whether it is pinned."""
        known, scheduler = self._adapters, self._scheduler()
        slots = self.slots or [None] * scheduler.config.max_loras
        return [(known[id_].lora_name, id_ in scheduler.pinned_loras) if id_ in known else ("", False) for id_ in slots]
