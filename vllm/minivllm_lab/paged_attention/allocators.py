"""Cache memory allocators compared on the same requests: the contiguous ones that lesson 02 replaces."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from minivllm_lab.paged_attention.memory_replay import Memory, Occupancy, Running, replay
from minivllm_lab.progress import track
from minivllm_simulate.workloads import WORKLOADS, RequestLengths

Region = Callable[[RequestLengths], int]
"""Slots that a request reserves when it is admitted and keeps until it ends."""


class FirstFit:
    """Contiguous regions of any length, each in the first hole that is long enough.

    A `minivllm_lab.paged_attention.memory_replay.Memory`.
    """

    def __init__(self, slots: int, region: Region) -> None:
        self.slots, self.region = slots, region
        self.taken: list[tuple[int, int]] = []  # (first slot, slots) of each region, in order

    def admit(self, one: Running) -> bool:
        """Reserve the whole region now, if there is a hole for it."""
        size, hole = self.region(one.lengths), 0
        for first, length in [*self.taken, (self.slots, 0)]:
            if first - hole >= size:
                one.home = (hole, size)
                insort(self.taken, one.home)
                return True
            hole = first + length
        return False

    def grow(self, one: Running) -> bool:
        """Always succeeds: the next token's slot is already reserved."""
        return True

    def release(self, one: Running) -> None:
        """Free the region."""
        self.taken.remove(one.home)

    def held(self, one: Running) -> int:
        """The whole region, written or not."""
        return one.home[1]


class Buddy:
    """A buddy allocator: every region is a power of two long and lies at a multiple of its length.

    Memory is halved until a piece just fits; the other half is its buddy. A freed piece is merged with its buddy, if
    that is free too. A `minivllm_lab.paged_attention.memory_replay.Memory`; the paper assumes such an allocator for
    Orca (Kwon et al. 2023, section 6.1).
    """

    def __init__(self, slots: int, region: Region) -> None:
        self.slots, self.region = slots, region
        self.free: set[tuple[int, int]] = set()  # (slots, first slot) of each free piece
        first = 0
        for bit in reversed(range(slots.bit_length())):
            if slots >> bit & 1:
                self.free.add((1 << bit, first))
                first += 1 << bit

    def admit(self, one: Running) -> bool:
        """Reserve a piece for the whole region now: the smallest that is free, halved while a half is enough."""
        reserved = self.region(one.lengths)
        fitting = [piece for piece in self.free if piece[0] >= reserved]
        if not fitting:
            return False
        length, first = min(fitting)
        self.free.remove((length, first))
        while length // 2 >= reserved:
            length //= 2
            self.free.add((length, first + length))
        one.home = (first, length, reserved)
        return True

    def grow(self, one: Running) -> bool:
        """Always succeeds: the next token's slot is already reserved."""
        return True

    def release(self, one: Running) -> None:
        """Free the piece, and merge it with its buddy for as long as that is free."""
        first, length, _ = one.home
        while (length, first ^ length) in self.free:
            self.free.remove((length, first ^ length))
            first, length = first & ~length, 2 * length
        self.free.add((length, first))

    def held(self, one: Running) -> int:
        """What was asked for. The rest of the piece counts as outside, as in the paper's figure 2."""
        return one.home[2]


def reservations(longest: int) -> dict[str, Callable[[int], Memory]]:
    """Contiguous memories by the rule for a region's length, each made for a given number of slots.

    The first three are Orca as the paper builds it (Kwon et al. 2023, section 6.1): `max` reserves the `longest`
    request that is served, `pow2` rounds the output up to a power of two, and `oracle` is told the output's length. The
    fourth, `exact`, is told it too, and its allocator rounds nothing up; the paper has no such baseline.
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
    allocators: Mapping[str, Callable[[int], Memory]],
    names: Iterable[str],
    slots: int,
    steps: int,
    longest: int,
    seed: int,
) -> dict[str, dict[str, Occupancy]]:
    """Occupancy of `slots` slots under each allocator, for requests from each of these workloads.

    Each of `allocators` makes an empty memory of a given number of slots. Requests over `longest` tokens are left out.
    """
    sampled = {name: WORKLOADS[name].sample(max(1000, steps * slots // 2000), seed) for name in names}  # enough of them
    found: dict[str, dict[str, Occupancy]] = {name: {} for name in sampled}
    for name, kind in track([(name, kind) for name in sampled for kind in allocators], "replaying requests"):
        requests = [one for one in sampled[name] if one.total <= longest]
        found[name][kind] = replay(allocators[kind](slots), requests, steps)
    return found
