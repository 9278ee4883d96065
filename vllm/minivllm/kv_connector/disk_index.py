"""Which keys lie in files: the books of the tier below host memory, and its folder. The ranks write and read the files.

In vLLM v0.33.0: `disk_path` of `vllm/v1/simple_kv_offload/`, `vllm/v1/kv_offload/tiering/`.
"""

import contextlib
import fcntl
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from minivllm.core.block_hash import BlockHash
from minivllm.errors import MinivllmError

HEADER_BYTES = 32
MOST_FOLDERS = 64


class DiskIndex:
    """At most `num_blocks` keys; the one that was asked for or written longest ago goes first, unless it is pinned.

    A key can be found once all ranks have written its file (`written`), and stays pinned while it is read.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._stopped = num_blocks == 0
        self._order: OrderedDict[BlockHash, None] = OrderedDict()
        self._being_written: set[BlockHash] = set()
        self._pinned: Counter[BlockHash] = Counter()

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def take(self, evicted: Sequence[tuple[BlockHash, int]]) -> tuple[list[tuple[BlockHash, int]], list[BlockHash]]:
        """Chooses which of the keys that host memory evicts are written; returns them, and keys whose files must go."""
        if self._stopped:
            return [], []
        spills: list[tuple[BlockHash, int]] = []
        for key, block_id in evicted:
            if key in self._order:
                self._order.move_to_end(key)
            elif key not in self._being_written:
                spills.append((key, block_id))
        removals = self._make_room(min(len(spills), self.num_blocks))
        room = self.num_blocks - len(self._order) - len(self._being_written)
        spills = spills[: max(0, room)]
        self._being_written.update(key for key, _ in spills)
        return spills, removals

    def _make_room(self, count: int) -> list[BlockHash]:
        surplus = len(self._order) + len(self._being_written) + count - self.num_blocks
        removals = [key for key in self._order if key not in self._pinned][: max(0, surplus)]
        for key in removals:
            del self._order[key]
        return removals

    def written(self, keys: Iterable[BlockHash]) -> None:
        """All ranks have ended the writing of these keys; those that were forgotten meanwhile could not be written."""
        for key in keys:
            if key in self._being_written:
                self._being_written.remove(key)
                self._order[key] = None

    def found(self, keys: Iterable[BlockHash]) -> list[BlockHash]:
        """Takes in keys of files that an earlier engine has left, oldest first; returns those that are too many."""
        self._order.update(dict.fromkeys(keys))
        return self._make_room(0)

    def forget(self, keys: Iterable[BlockHash]) -> None:
        """These keys' files cannot be written, or not be read."""
        for key in keys:
            self._order.pop(key, None)
            self._being_written.discard(key)

    def pin(self, keys: Iterable[BlockHash]) -> None:
        """These are being read, so they were asked for, and must stay."""
        for key in keys:
            self._order.move_to_end(key)
            self._pinned[key] += 1

    def unpin(self, keys: Iterable[BlockHash]) -> None:
        """Ends one `pin` of these keys, whether they are still there or not."""
        for key in keys:
            self._pinned[key] -= 1
            if self._pinned[key] <= 0:
                del self._pinned[key]

    def stop(self) -> None:
        """Nothing is written any more; what is there can still be read."""
        self._stopped = True

    def clear(self) -> None:
        """Forgets all keys."""
        self._order.clear()
        self._being_written.clear()
        self._pinned.clear()


class DiskFolder:
    """A folder of one engine's own below `disk_path`, for as long as it lives: others take another one.

    An engine with the same model that starts later finds the files again.
    """

    def __init__(self, disk_path: str, kind: str) -> None:
        """`kind` stands for all that two engines must have in common to read each other's files.

        Raises:
            MinivllmError: the folder cannot be made or written.
        """
        for number in range(MOST_FOLDERS):
            self.path = Path(disk_path) / f"{kind}-{number}"
            try:
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = (self.path / "lock").open("w")
            except (OSError, ValueError) as error:  # ValueError: it has a NUL
                why = getattr(error, "strerror", error)
                raise MinivllmError(f"disk_path {disk_path!r} cannot be used: {why}") from None
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                continue
            return
        raise MinivllmError(f"disk_path {disk_path!r} is used by {MOST_FOLDERS} other engines: give it another folder")

    def keys(self, num_ranks: int) -> list[BlockHash]:
        """The keys of which each rank's file is there, oldest first. Unfinished files go."""
        ranks: Counter[bytes] = Counter()
        ages: dict[bytes, float] = {}
        for path in self.path.iterdir():
            stem, _, suffix = path.name.partition(".")
            with contextlib.suppress(ValueError, OSError):
                if path.suffix == UNFINISHED:
                    path.unlink()
                elif suffix.isdecimal() and int(suffix) < num_ranks:
                    key = bytes.fromhex(stem)
                    ages[key] = path.stat().st_mtime
                    ranks[key] += 1
        return sorted((key for key, count in ranks.items() if count == num_ranks), key=ages.__getitem__)

    def close(self) -> None:
        """Lets others have it."""
        self._lock.close()


UNFINISHED = ".unfinished"


def path_of(folder: Path, key: BlockHash, rank: int) -> Path:
    """The file with one rank's part of a block."""
    return folder / f"{key.hex()}.{rank}"
