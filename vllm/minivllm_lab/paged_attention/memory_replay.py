"""Replays requests on one memory with any allocator: what its slots hold, and how many requests run at once.

No clock and no model: a step gives every running request one token. The queue never runs empty, so what is measured is
the memory alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from minivllm.errors import MinivllmError
from minivllm_simulate.workloads import RequestLengths


@dataclass(eq=False)
class Running:
    """One request: its lengths, the tokens that it has in the cache, and where they are (the memory's own business)."""

    lengths: RequestLengths
    tokens: int
    home: Any = None


class Memory(Protocol):
    """An allocator of `slots` token slots."""

    slots: int

    def admit(self, one: Running) -> bool:
        """Allocate memory for the request's current tokens; False if there is not enough."""
        ...

    def grow(self, one: Running) -> bool:
        """Make room for one more token; False if there is none."""
        ...

    def release(self, one: Running) -> None:
        """Free the request's memory."""
        ...

    def held(self, one: Running) -> int:
        """Slots that no other request can use while it runs."""
        ...


class Table(Protocol):
    """One sequence's blocks: what lesson 02 builds."""

    def append(self, num_tokens: int) -> Any:
        """Allocate room for more tokens; raises a MinivllmError, changing nothing, if the pool has none."""
        ...

    def free(self) -> None:
        """Free every block."""
        ...

    @property
    def blocks(self) -> Sequence[Any]:
        """The blocks held."""
        ...


class TablesOnDemand:
    """A `Memory` in blocks: each request has a table, which takes a block when a token needs it."""

    def __init__(self, slots: int, block_size: int, new_table: Callable[[], Table]) -> None:
        self.slots, self.block_size, self.new_table = slots, block_size, new_table

    def admit(self, one: Running) -> bool:
        """Allocate blocks for the request's current tokens."""
        one.home = self.new_table()
        return self._append(one, one.tokens)

    def grow(self, one: Running) -> bool:
        """Add one token, with a new block only if the last one is full."""
        return self._append(one, 1)

    def release(self, one: Running) -> None:
        """Free the blocks."""
        one.home.free()

    def held(self, one: Running) -> int:
        """Whole blocks."""
        return len(one.home.blocks) * self.block_size

    def _append(self, one: Running, num_tokens: int) -> bool:
        try:
            one.home.append(num_tokens)
        except MinivllmError:
            return False
        return True


@dataclass(frozen=True)
class Occupancy:
    """Averages over the counted steps; the four shares are of all slots and sum to 1."""

    tokens: float
    """Share that holds a token."""
    later: float
    """Share that is kept for a token to come."""
    never: float
    """Share that is held and will never be written."""
    outside: float
    """Share that no request holds."""
    running: float
    """Requests at once."""
    served_per_1000_steps: float
    evicted: int
    """Number of preemptions: a request lost its memory so that another could grow."""

    @property
    def empty(self) -> float:
        """The share of the held slots in which no token lies."""
        return (self.later + self.never) / (1 - self.outside)

    def figures(self) -> dict[str, float]:
        """As they go into a results file, with the shares that hold no token: of all slots, and of those held."""
        return {**asdict(self), "empty": 1 - self.tokens, "empty_of_held": self.empty}


def replay(memory: Memory, requests: Iterable[RequestLengths], steps: int) -> Occupancy:
    """Serve requests first come, first served, one token each a step.

    Running requests grow first; if there is no room, the last admitted one is preempted and waits at the head of the
    queue, and such a step admits no request. The first quarter of the steps is not counted.

    Raises:
        MinivllmError: a request does not fit even alone, or there are too few requests for that many steps.
    """
    waiting = deque(Running(lengths, lengths.prompt_tokens) for lengths in requests)
    running: list[Running] = []
    sums = [0, 0, 0, 0, 0]
    served = evicted = 0
    for step in range(steps):
        lost = _grow(memory, running, waiting)
        while waiting and not lost and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        if not waiting or not running:
            problem = "the queue ran empty: give more requests" if running else "the next request does not fit alone"
            raise MinivllmError(f"step {step} of {steps}: {problem}")
        if step >= steps // 4:
            evicted += lost
            served += sum(one.tokens >= one.lengths.total for one in running)
            sums = [a + b for a, b in zip(sums, _slots(memory, running), strict=True)]
        for one in running:
            if one.tokens >= one.lengths.total:
                memory.release(one)
        running = [one for one in running if one.tokens < one.lengths.total]
    counted = steps - steps // 4
    tokens, later, never, outside = (amount / counted / memory.slots for amount in sums[:4])
    return Occupancy(tokens, later, never, outside, sums[4] / counted, 1000 * served / counted, evicted)


def _grow(memory: Memory, running: list[Running], waiting: deque[Running]) -> int:
    """Add one token to each running request; returns the number of preemptions."""
    lost = 0
    for one in list(running):
        while one.home is not None and not memory.grow(one):
            last = running.pop()
            memory.release(last)
            last.home = None
            waiting.appendleft(last)
            lost += 1
        one.tokens += one.home is not None
    return lost


def _slots(memory: Memory, running: list[Running]) -> tuple[int, int, int, int, int]:
    """Slots that hold a token, that will, that never will, that nobody holds; and the requests that run."""
    held = [memory.held(one) for one in running]
    used = [min(size, one.lengths.total) for size, one in zip(held, running, strict=True)]
    tokens = sum(one.tokens for one in running)
    return tokens, sum(used) - tokens, sum(held) - sum(used), memory.slots - sum(held), len(running)
