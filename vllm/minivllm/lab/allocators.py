"""Cache memory allocators compared on the same requests, and the naive one that lesson 02 replaces."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping

from minivllm.lab.progress import track
from minivllm.simulate.memory_replay import Memory, Occupancy, Running, replay
from minivllm.simulate.workloads import WORKLOADS, RequestLengths


class Reservations:
    """First-fit allocation of contiguous regions, each held until its request ends.

    `region` says how many slots a request reserves. A `minivllm.simulate.memory_replay.Memory`.
    """

    def __init__(self, slots: int, region: Callable[[RequestLengths], int]) -> None:
        self.slots, self.region = slots, region
        self.taken: list[tuple[int, int]] = []  # (first slot, slots) of each region, in order

    def admit(self, one: Running) -> bool:
        """Reserve the whole region now, in the first hole that is long enough."""
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
