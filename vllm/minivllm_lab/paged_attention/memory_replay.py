"""Replay requests on one memory with any allocator; count what its slots hold and how many requests
run at once.

There is no clock and no model: a step gives every running request one token. The queue never runs
empty, so only the memory is measured.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from minivllm.errors import MinivllmError
from minivllm_simulate.workloads import RequestLengths


@dataclass(eq=False)
class Running:
    """One request: its lengths, its tokens in the cache, and their location as its memory records
    it.
    """

    lengths: RequestLengths
    tokens: int
    home: Any = None

    @property
    def is_complete(self) -> bool:
        """Return whether the request has all its tokens."""
        return self.tokens >= self.lengths.total


class Memory:
    """An allocator of `slots` token slots."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def admit(self, request: Running) -> bool:
        """Allocate memory for the request's current tokens; return False if there is not enough."""
        raise NotImplementedError

    def grow(self, request: Running) -> bool:
        """Make room for one more token; return False if there is none. A reservation already has
        room.
        """
        return True

    def release(self, request: Running) -> None:
        """Free the request's memory."""
        raise NotImplementedError

    def held(self, request: Running) -> int:
        """Return the number of slots that no other request can use while this one runs."""
        raise NotImplementedError


class Occupancy(NamedTuple):
    """Averages over the counted steps; the four shares are shares of all slots and sum to 1."""

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
        """Return the share of the held slots without a token."""
        return (self.later + self.never) / (1 - self.outside)

    def figures(self) -> dict[str, float]:
        """Return the figures for a results file, adding the share of slots without a token, of all
        slots and of held ones.
        """
        return {**self._asdict(), "empty": 1 - self.tokens, "empty_of_held": self.empty}


def serve(memory: Memory, waiting: deque[Running]) -> Iterator[tuple[list[Running], int]]:
    """Serve the queue, first come, first served, one token per request and step. Yield the running
    requests of each step and the number of preemptions in it.

    Running requests grow first; if there is no room, the last admitted one is preempted and waits
    at the head of the queue, and such a step admits no request.
    """
    running: list[Running] = []
    while True:
        preempted = _grow(memory, running, waiting)
        while waiting and not preempted and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        yield running, preempted
        for request in [request for request in running if request.is_complete]:
            memory.release(request)
            running.remove(request)


def replay(memory: Memory, requests: Iterable[RequestLengths], steps: int) -> Occupancy:
    """Serve requests and average what the slots hold. The first quarter of the steps is not counted.

    Raises:
        MinivllmError: a request does not fit even alone, or there are too few requests for that
            many steps.
    """
    waiting = deque(Running(lengths, lengths.prompt_tokens) for lengths in requests)
    sums = [0, 0, 0, 0, 0]
    served = evicted = 0
    for step, (running, preempted) in enumerate(islice(serve(memory, waiting), steps)):
        if not waiting or not running:
            problem = "the queue ran empty: pass more requests" if running else "the next request does not fit alone"
            raise MinivllmError(f"step {step} of {steps}: {problem}")
        if step >= steps // 4:
            evicted += preempted
            served += sum(request.is_complete for request in running)
            sums = [a + b for a, b in zip(sums, _slots(memory, running), strict=True)]
    counted = steps - steps // 4
    tokens, later, never, outside = (amount / counted / memory.slots for amount in sums[:4])
    return Occupancy(tokens, later, never, outside, sums[4] / counted, 1000 * served / counted, evicted)


def _grow(memory: Memory, running: list[Running], waiting: deque[Running]) -> int:
    """Add one token to each running request; return the number of preemptions."""
    preempted = 0
    for request in list(running):
        while request.home is not None and not memory.grow(request):
            last = running.pop()
            memory.release(last)
            last.home = None
            waiting.appendleft(last)
            preempted += 1
        request.tokens += request.home is not None
    return preempted


def _slots(memory: Memory, running: list[Running]) -> tuple[int, int, int, int, int]:
    """Count the slots of each kind in `Occupancy`, and the running requests."""
    held = [memory.held(request) for request in running]
    used = [min(size, request.lengths.total) for size, request in zip(held, running, strict=True)]
    tokens = sum(request.tokens for request in running)
    return tokens, sum(used) - tokens, sum(held) - sum(used), memory.slots - sum(held), len(running)
