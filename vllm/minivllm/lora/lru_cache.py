"""A dictionary of limited size that evicts the least recently used entry, unless it is pinned.

In vLLM v0.33.0: `vllm/utils/cache.py` (`LRUCache`), `vllm/lora/model_manager.py`
(`AdapterLRUCache`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from minivllm.errors import MinivllmError

Value = TypeVar("Value")


class AdapterLRUCache(Generic[Value]):
    """Adapters by id, up to `capacity` of them. `on_remove` is called with the id of each adapter
    that is removed.
    """

    def __init__(self, capacity: int, on_remove: Callable[[int], None], what: str) -> None:
        """Hold up to `capacity` adapters; `what` is the name of their places in messages."""
        self.capacity = capacity
        self.pinned = set[int]()
        self._on_remove = on_remove
        self._what = what
        self._items: OrderedDict[int, Value] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[int]:
        """Iterate from the least to the most recently used."""
        return iter(list(self._items))  # a copy, so that the caller may remove some

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: int) -> Value:
        """Return the value without marking it as used."""
        return self._items[key]

    def touch(self, key: int) -> None:
        """Mark an adapter as most recently used."""
        self._items.move_to_end(key)

    def put(self, key: int, value: Value) -> None:
        """Add or replace an adapter, as the most recently used one. Call `make_room` first if the
        cache is full.
        """
        assert key in self._items or len(self._items) < self.capacity
        self._items[key] = value
        self.touch(key)

    def make_room(self) -> None:
        """Remove the least recently used adapter that is not pinned, if the cache is full.

        Raises:
            MinivllmError: all are pinned.
        """
        if len(self._items) < self.capacity:
            return
        for key in self._items:  # from the least recently used on
            if key not in self.pinned:
                self.remove(key)
                return
        raise MinivllmError(f"all {self.capacity} {self._what} are pinned: remove an adapter, or raise their number")

    def remove(self, key: int) -> bool:
        """Remove an adapter, pinned or not; return whether it was there."""
        if key not in self._items:
            return False
        del self._items[key]
        self.pinned.discard(key)
        self._on_remove(key)
        return True

    def pin(self, key: int) -> None:
        """Protect an adapter from eviction."""
        assert key in self._items
        self.pinned.add(key)
