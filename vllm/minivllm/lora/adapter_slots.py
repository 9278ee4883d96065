"""Which adapter lies in which slot of the device. Bookkeeping only, no torch.

In vLLM v0.33.0: `vllm/lora/model_manager.py` (`LRUCacheLoRAModelManager`: `lora_index_to_id`, `activate_adapter`,
`deactivate_adapter`, `pin_adapter`).
"""

from minivllm.lora.lru_cache import AdapterLRUCache


class AdapterSlots:
    """The adapters in `max_loras` slots, by their ids: the least recently used goes first, a pinned one never."""

    def __init__(self, max_loras: int) -> None:
        self.slots: list[int | None] = [None] * max_loras
        """The adapter in each slot; None: it is free."""
        self._active = AdapterLRUCache[int](max_loras, self._emptied, "slots (max_loras)")

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._active

    @property
    def pinned(self) -> set[int]:
        """Adapters that keep their slot."""
        return self._active.pinned

    def activate(self, lora_id: int) -> int:
        """Return an adapter's slot and make it the most recently used.

        One that has no slot gets the first free one, or else that of the least recently used adapter.

        Raises:
            MinivllmError: no slot is free, and all adapters in them are pinned.
        """
        if lora_id not in self._active:
            self._active.make_room()
            slot = self.slots.index(None)
            self.slots[slot] = lora_id
            self._active.put(lora_id, slot)
        self._active.touch(lora_id)
        return self._active[lora_id]

    def deactivate(self, lora_id: int) -> bool:
        """Empty an adapter's slot, pinned or not; returns whether it had one."""
        return self._active.remove(lora_id)

    def pin(self, lora_id: int) -> None:
        """Keep an adapter in its slot until it is deactivated; one that has none gets one first.

        Raises:
            MinivllmError: it gets none, since all slots hold pinned adapters.
        """
        if lora_id not in self._active:
            self.activate(lora_id)
        self._active.pin(lora_id)

    def _emptied(self, lora_id: int) -> None:
        self.slots[self.slots.index(lora_id)] = None
