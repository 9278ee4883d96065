"""XXH64, a checksum of bytes that is several times as fast as CRC-32, compiled by numba.

The algorithm is Yann Collet's, as its specification describes it (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): four
lanes of 64 bits, so that a processor multiplies in all of them at once. It finds damage, not deceit: whoever wants to
can make other bytes with the same sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import njit

from minivllm.kernels.cpu.programs import array_at, compile_function, sources_changed

PRIME_1 = np.uint64(0x9E3779B185EBCA87)
PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME_3 = np.uint64(0x165667B19E3779F9)
PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME_5 = np.uint64(0x27D4EB2F165667C5)
ZERO, BITS = np.uint64(0), np.uint64(64)
jit = njit(nogil=True, inline="always")


@jit
def rotated(number, by):
    """The bits moved to the left, those that fall off put on at the right."""
    return (number << np.uint64(by)) | (number >> (BITS - np.uint64(by)))


@jit
def round_of(lane, word):
    """A lane after taking in 8 bytes."""
    return rotated(lane + word * PRIME_2, 31) * PRIME_1


@jit
def merged(total, lane):
    """The sum after taking in a lane."""
    return (total ^ round_of(ZERO, lane)) * PRIME_1 + PRIME_4


@jit
def of_stripes(words, stripes):
    """The sum of all whole stripes of four words."""
    one, two, three, four = PRIME_1 + PRIME_2, PRIME_2, ZERO, ZERO - PRIME_1
    for at in range(0, 4 * stripes, 4):
        one, two = round_of(one, words[at]), round_of(two, words[at + 1])
        three, four = round_of(three, words[at + 2]), round_of(four, words[at + 3])
    total = rotated(one, 1) + rotated(two, 7) + rotated(three, 12) + rotated(four, 18)
    return merged(merged(merged(merged(total, one), two), three), four)


def _xxh64(address, size):
    stripes = size // 32
    words, rest = array_at(address, size // 8, np.uint64), array_at(address, size, np.uint8)
    total = of_stripes(words, stripes) if stripes else PRIME_5
    total += np.uint64(size)
    for at in range(4 * stripes, size // 8):
        total = rotated(total ^ round_of(ZERO, words[at]), 27) * PRIME_1 + PRIME_4
    done = size // 8 * 8
    if size - done >= 4:
        half = np.uint64(array_at(address + done, 1, np.uint32)[0])
        total = rotated(total ^ (half * PRIME_1), 23) * PRIME_2 + PRIME_3
        done += 4
    for at in range(done, size):
        total = rotated(total ^ (np.uint64(rest[at]) * PRIME_5), 11) * PRIME_1
    total = (total ^ (total >> np.uint64(33))) * PRIME_2
    total = (total ^ (total >> np.uint64(29))) * PRIME_3
    return total ^ (total >> np.uint64(32))


@functools.cache
def xxh64_of_parts() -> Callable[[np.ndarray, np.ndarray], int]:
    """The compiled function of (addresses, sizes), [n] int64 each: XXH64 with seed 0 of `sizes[0]` bytes there.

    Of several parts, their sums taken in one after the other, as XXH64 takes in its lanes. Other Python threads run
    meanwhile.
    """
    changed = sources_changed()

    def xxh64_of_parts(addresses, sizes):
        _ = changed
        total = _compiled(addresses[0], sizes[0])
        for index in range(1, len(addresses)):
            total = merged(total, _compiled(addresses[index], sizes[index]))
        return total

    return compile_function(xxh64_of_parts)


_compiled = njit(nogil=True)(_xxh64)
