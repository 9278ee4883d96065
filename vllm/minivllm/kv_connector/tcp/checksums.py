"""Bytes that lie in several places, and their checksums: XXH64 where both sides have numba to compile it, else CRC-32.

Blocks of a cache are sent from where they lie and received where they belong, so a payload is a list of parts. Its
XXH64 is made of its parts' sums, in one compiled loop; its CRC-32 is that of all its bytes.

Measured on one core (AMD EPYC, 512 KiB that lie in its cache): XXH64 10 GB/s, CRC-32 of Python's zlib 4.3 GB/s.
Loopback gives 1 to 4 GB/s, and both sides sum up every byte, so this decides how much of it is left. TCP's own sum
has 16 bits, and ends at the network card.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minivllm.platforms.threads import has_numba


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes in several places, in this order: as views, and as addresses and sizes, [parts] int64 each."""

    parts: list[memoryview]
    addresses: np.ndarray
    sizes: np.ndarray
    nbytes: int

    @classmethod
    def of(cls, *buffers: bytes | bytearray | memoryview) -> "Payload":
        """These buffers, none of them empty."""
        parts = [memoryview(buffer) for buffer in buffers]
        addresses = np.array([np.frombuffer(part, np.uint8).ctypes.data for part in parts], np.int64)
        sizes = np.array([len(part) for part in parts], np.int64)
        return cls(parts, addresses, sizes, int(sizes.sum()))


NOTHING = Payload.of()
Checksum = Callable[[Payload], int]


def xxh64(payload: Payload) -> int:
    """One part's XXH64 with seed 0, or what the compiled loop makes of several. Other Python threads run meanwhile."""
    from minivllm.kernels.cpu.checksum_loops import xxh64_of_parts

    return int(xxh64_of_parts()(payload.addresses, payload.sizes))


def crc32(payload: Payload) -> int:
    """CRC-32 of all bytes."""
    total = 0
    for part in payload.parts:
        total = zlib.crc32(part, total)
    return total


CHECKSUMS: dict[str, Checksum] = {"xxh64": xxh64, "crc32": crc32}
"""By name, the fastest first."""


def own_checksums() -> list[str]:
    """Names of those that can be computed here."""
    return [name for name in CHECKSUMS if name != "xxh64" or has_numba()]


def common_checksum(theirs: list[str]) -> str:
    """The fastest that both sides have."""
    return next((name for name in own_checksums() if name in theirs), "crc32")
