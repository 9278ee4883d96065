"""The device's adapter slots: the least recently used adapter is evicted first, a pinned one never.

This is bookkeeping only: the owner of the tensors copies an adapter's weights in when `activate`
gives the adapter a new slot. In vLLM v0.33.0: `vllm/lora/model_manager.py`
(`LRUCacheLoRAModelManager`, `AdapterLRUCache`).
"""

import heapq

from minivllm.errors import MinivllmError


class AdapterSlots:
    """The assignment of adapters, by id, to `max_loras` slots. Every operation takes O(log
    max_loras), apart from skipping pinned adapters.
    """

    def __init__(self, max_loras: int) -> None:
        self.slots: list[int | None] = [None] * max_loras
        """The adapter in each slot."""
        self.pinned: set[int] = set()
        self._slot_of: dict[int, int] = {}
        """By adapter, the least recently used first."""
        self._free = list(range(max_loras))

    def __contains__(self, adapter_id: int) -> bool:
        return adapter_id in self._slot_of

    def activate(self, adapter_id: int) -> int:
        """Return an adapter's slot and make it the most recently used.

        An adapter without a slot gets the lowest free one, or else the slot of the least recently
        used adapter that is not pinned.

        Raises:
            MinivllmError: no slot is free, and all of them hold pinned adapters.
        """
        slot = self._slot_of.pop(adapter_id, None)
        if slot is None:
            if not self._free:
                self.deactivate(self._least_recently_used())
            # The lowest free slot, so that equal runs use equal slots.
            slot = heapq.heappop(self._free)
            self.slots[slot] = adapter_id
        self._slot_of[adapter_id] = slot
        return slot

    def deactivate(self, adapter_id: int) -> None:
        """Empty an adapter's slot, pinned or not; do nothing if it has none."""
        slot = self._slot_of.pop(adapter_id, None)
        if slot is not None:
            self.slots[slot] = None
            self.pinned.discard(adapter_id)
            heapq.heappush(self._free, slot)

    def pin(self, adapter_id: int) -> None:
        """Keep an adapter in its slot until it is deactivated; give it a slot first if it has none.

        Raises:
            MinivllmError: it has no slot, and all slots hold pinned adapters.
        """
        if adapter_id not in self._slot_of:
            self.activate(adapter_id)
        self.pinned.add(adapter_id)

    def _least_recently_used(self) -> int:
        for adapter_id in self._slot_of:
            if adapter_id not in self.pinned:
                return adapter_id
        raise MinivllmError(
            f"no slot for another adapter: all {len(self.slots)} hold pinned adapters; remove one, or raise max_loras"
        )
