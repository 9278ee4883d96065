"""A dictionary of limited size that forgets what was used least recently, unless it is pinned.

In vLLM v0.33.0: `vllm/utils/cache.py` (`LRUCache`), `vllm/lora/model_manager.py` (`AdapterLRUCache`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from minivllm.errors import MinivllmError

Value = TypeVar("Value")


class AdapterLRUCache(Generic[Value]):
    """Adapters by id, at most `capacity`. `on_remove` is told the id of each that goes, whatever the reason."""

    def __init__(self, capacity: int, on_remove: Callable[[int], None], what: str) -> None:
        """`what` the places are, for messages."""
        self.capacity, self.pinned = capacity, set[int]()
        self._on_remove, self._what = on_remove, what
        self._items: OrderedDict[int, Value] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[int]:
        """From the least to the most recently used."""
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, key: int) -> Value:
        """The value, without using it."""
        return self._items[key]

    def touch(self, key: int) -> None:
        """Marks it as used just now."""
        self._items.move_to_end(key)

    def put(self, key: int, value: Value) -> None:
        """Adds it as used just now, or replaces it. If it is full, `make_room` must come before."""
        assert key in self._items or len(self._items) < self.capacity
        self._items[key] = value
        self.touch(key)

    def make_room(self) -> None:
        """Removes the least recently used one that is not pinned, if it is full.

        Raises:
            MinivllmError: all are pinned.
        """
        if len(self._items) < self.capacity:
            return
        for key in self._items:
            if key not in self.pinned:
                self.remove(key)
                return
        raise MinivllmError(f"all {self.capacity} {self._what} are pinned: remove an adapter, or have more of them")

    def remove(self, key: int) -> bool:
        """Removes it, pinned or not; returns whether it was there."""
        if key not in self._items:
            return False
        del self._items[key]
        self.pinned.discard(key)
        self._on_remove(key)
        return True

    def pin(self, key: int) -> None:
        """Keeps it from being removed to make room."""
        assert key in self._items
        self.pinned.add(key)
