"""Ways to hand out a cache's memory, replayed on the same requests; and the naive one, which lesson 02 replaces."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping

from minivllm.lab.progress import track
from minivllm.simulate.memory_replay import Memory, Occupancy, Running, replay
from minivllm.simulate.workloads import WORKLOADS, RequestLengths


class Reservations:
    """Memory by regions: a request keeps one run of neighbouring slots, the first that is long enough, until it ends.

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
        """One more token goes into the slot that was reserved for it."""
        return True

    def release(self, one: Running) -> None:
        """Give the region back."""
        self.taken.remove(one.home)

    def held(self, one: Running) -> int:
        """All of the region, written or not."""
        return one.home[1]


def replay_workloads(
    allocators: Mapping[str, Callable[[int], Memory]],
    names: Iterable[str],
    slots: int,
    steps: int,
    longest: int,
    seed: int,
) -> dict[str, dict[str, Occupancy]]:
    """What `slots` slots held under each allocator, for requests like each of these workloads.

    `allocators` make an empty memory of so many slots. Requests of more than `longest` tokens are left out.
    """
    sampled = {name: WORKLOADS[name].sample(max(1000, steps * slots // 2000), seed) for name in names}  # enough of them
    found: dict[str, dict[str, Occupancy]] = {name: {} for name in sampled}
    for name, kind in track([(name, kind) for name in sampled for kind in allocators], "replaying requests"):
        requests = [one for one in sampled[name] if one.total <= longest]
        found[name][kind] = replay(allocators[kind](slots), requests, steps)
    return found
