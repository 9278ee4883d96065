"""Files with one rank's part of a block each: its bytes behind a header with their number and checksum.

A file appears when it is complete. One that is missing, cut, altered or another one's is a miss, and nothing in it is
ever executed or unpacked. A disk that is full, or fails, is told once; what is there can still be read. A file that
cannot be removed stays.
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minivllm.core.block_hash import BlockHash
from minivllm.kv_connector.checksums import CHECKSUMS, Payload, own_checksums
from minivllm.kv_connector.disk_index import HEADER_BYTES, UNFINISHED, path_of
from minivllm.logger import init_logger

logger = init_logger(__name__)
HEADER = struct.Struct("<8s8sQQ")  # what it is, how it is summed up, number of bytes, checksum
MAGIC = b"minikv2\0"
assert HEADER.size == HEADER_BYTES


class DiskFiles:
    """One rank's files. One thread at a time may write, another may read."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.failed = folder, rank, False
        self._checksum = own_checksums()[0]

    def write(self, key: BlockHash, payload: np.ndarray) -> bool:
        """Writes a file, uint8 [bytes]; returns whether it is there. After the first failure nothing is written."""
        if self.failed:
            return False
        path = path_of(self.folder, key, self.rank)
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            with unfinished.open("wb", buffering=0) as opened:
                _write_all(opened.fileno(), (self._header(key, payload), payload.data))
            os.replace(unfinished, path)
        except OSError as error:
            self.failed = True
            logger.warning("No more blocks are written to %s: %s", self.folder, error.strerror)
            _remove(unfinished)
            return False
        return True

    def read(self, key: BlockHash, into: np.ndarray) -> bool:
        """Fills uint8 [bytes] from a file; returns whether it held just that. One that does not is removed."""
        path = path_of(self.folder, key, self.rank)
        try:
            with open(path, "rb", buffering=0, opener=_open_at_once) as opened:
                header = opened.read(HEADER_BYTES)
                num_read = opened.readinto(into.data)
                complete = num_read == len(into) and not opened.read(1)
        except OSError:
            return False
        if complete and header == self._header(key, into):
            return True
        logger.warning("%s is damaged, and removed", path)
        _remove(path)
        return False

    def remove(self, keys: Sequence[BlockHash]) -> None:
        """Removes these keys' files, as far as they are there."""
        for key in keys:
            _remove(path_of(self.folder, key, self.rank))

    def clear(self) -> None:
        """Removes all files of this rank."""
        for path in self.folder.glob(f"*.{self.rank}"):
            _remove(path)

    def _header(self, key: BlockHash, payload: np.ndarray) -> bytes:
        name = self._checksum
        whose = key + self.rank.to_bytes(4, "little")
        return HEADER.pack(MAGIC, name.encode(), len(payload), CHECKSUMS[name](Payload.of(payload.data, whose)))


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file, and a pipe without waiting for who writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _remove(path: Path) -> None:
    """Removes a file; one that is not there, or on a disk that fails or can only be read, costs no step."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
