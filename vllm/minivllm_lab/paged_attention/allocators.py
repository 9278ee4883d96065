"""The allocators that lesson 02 compares on the same requests: contiguous regions, and block tables
that grow.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.paged_attention.memory_replay import Memory, Occupancy, Running, replay
from minivllm_lab.progress import track
from minivllm_simulate.workloads import WORKLOADS, RequestLengths

Region = Callable[[RequestLengths], int]
"""Slots that a request reserves when it is admitted and keeps until it ends."""


class FirstFit(Memory):
    """An allocator of contiguous regions of any length, each placed in the first hole that is long
    enough.
    """

    def __init__(self, slots: int, region: Region) -> None:
        super().__init__(slots)
        self.region = region
        self.taken: list[tuple[int, int]] = []  # (first slot, slots) of each region, in order

    def admit(self, request: Running) -> bool:
        """Reserve the whole region now if some hole is long enough."""
        size, hole = self.region(request.lengths), 0
        for first, length in [*self.taken, (self.slots, 0)]:
            if first - hole >= size:
                request.home = (hole, size)
                insort(self.taken, request.home)
                return True
            hole = first + length
        return False

    def release(self, request: Running) -> None:
        """Free the region."""
        self.taken.remove(request.home)

    def held(self, request: Running) -> int:
        """Return the whole region's length, whether written or not."""
        return request.home[1]


class Buddy(Memory):
    """A buddy allocator: every region's length is a power of two, and it begins at a multiple of
    its length.

    Memory is halved until a piece just fits; the other half is its buddy. A freed piece is merged
    with its buddy, if that is free too. The paper assumes such an allocator for Orca (Kwon et al.
    2023, section 6.1).
    """

    def __init__(self, slots: int, region: Region) -> None:
        super().__init__(slots)
        self.region = region
        self.free: set[tuple[int, int]] = set()  # (slots, first slot) of each free piece
        first = 0
        for bit in reversed(range(slots.bit_length())):
            if slots >> bit & 1:
                self.free.add((1 << bit, first))
                first += 1 << bit

    def admit(self, request: Running) -> bool:
        """Reserve a piece for the whole region: the smallest free one, halved as long as a half is
        enough.
        """
        reserved = self.region(request.lengths)
        fitting = [piece for piece in self.free if piece[0] >= reserved]
        if not fitting:
            return False
        length, first = min(fitting)
        self.free.remove((length, first))
        while length // 2 >= reserved:
            length //= 2
            self.free.add((length, first + length))
        request.home = (first, length, reserved)
        return True

    def release(self, request: Running) -> None:
        """Free the piece, and merge it with its buddy as long as the buddy is free."""
        first, length, _ = request.home
        while (length, first ^ length) in self.free:
            self.free.remove((length, first ^ length))
            first, length = first & ~length, 2 * length
        self.free.add((length, first))

    def held(self, request: Running) -> int:
        """Return the reserved length. The rest of the piece counts as outside, as in the paper's
        figure 2.
        """
        return request.home[2]


class TablesOnDemand(Memory):
    """An allocator with a block table for each request, which gets a block only when a token needs
    it.
    """

    def __init__(self, slots: int, block_size: int, new_table: Callable[[], Any]) -> None:
        super().__init__(slots)
        self.block_size, self.new_table = block_size, new_table

    def admit(self, request: Running) -> bool:
        """Allocate blocks for the request's current tokens."""
        request.home = self.new_table()
        return self._append(request, request.tokens)

    def grow(self, request: Running) -> bool:
        """Add one token, with a new block only if the last one is full."""
        return self._append(request, 1)

    def release(self, request: Running) -> None:
        """Free the blocks."""
        request.home.free()

    def held(self, request: Running) -> int:
        """Return the number of slots in the request's blocks."""
        return len(request.home.blocks) * self.block_size

    def _append(self, request: Running, num_tokens: int) -> bool:
        try:
            request.home.append(num_tokens)
        except MinivllmError:
            return False
        return True


def reservations(longest: int) -> dict[str, Callable[[int], Memory]]:
    """Return, by name, constructors of contiguous memories that differ in how they size a region;
    each takes the number of slots.

    The first three are Orca as the paper models it (Kwon et al. 2023, section 6.1): `max` reserves
    room for the `longest` request, `pow2` rounds the output up to a power of two, and `oracle`
    knows the output's length. The fourth, `exact`, knows it too, and its allocator rounds nothing
    up; the paper has no such baseline.
    """

    def power_of_two(request: RequestLengths) -> int:
        return min(longest, request.prompt_tokens + 2 ** (request.output_tokens - 1).bit_length())

    return {
        "max": partial(Buddy, region=lambda request: longest),
        "pow2": partial(Buddy, region=power_of_two),
        "oracle": partial(Buddy, region=lambda request: request.total),
        "exact": partial(FirstFit, region=lambda request: request.total),
    }


def replay_workloads(
    allocators: Mapping[str, Callable[[int], Memory]], slots: int, steps: int, longest: int, seed: int,
    names: Iterable[str] = WORKLOADS,
) -> dict[str, dict[str, Occupancy]]:  # fmt: skip
    """Replay requests of each workload under each allocator, leaving out requests of more than
    `longest` tokens.
    """
    sampled = {name: WORKLOADS[name].sample(max(1000, steps * slots // 2000), seed) for name in names}  # enough of them
    results: dict[str, dict[str, Occupancy]] = {name: {} for name in sampled}
    for name, kind in track([(name, kind) for name in sampled for kind in allocators], "replaying requests"):
        requests = [lengths for lengths in sampled[name] if lengths.total <= longest]
        results[name][kind] = replay(allocators[kind](slots), requests, steps)
    return results
