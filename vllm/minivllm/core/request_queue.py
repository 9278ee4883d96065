"""The waiting queue: first come, first served, or by priority. Both kinds have the same methods;
iteration is in the order in which requests would be popped.

In vLLM v0.33.0: `vllm/v1/core/sched/request_queue.py` (`RequestQueue`, `FCFSRequestQueue`,
`PriorityRequestQueue`).
"""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from minivllm.core.request import Request


class FCFSRequestQueue:
    """First come, first served; requests that are put back go to the head."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Add at the tail."""
        self._requests.append(request)

    def peek_request(self) -> Request:
        """Return the head without removing it."""
        return self._requests[0]

    def pop_request(self) -> Request:
        """Remove and return the head."""
        return self._requests.popleft()

    def prepend_requests(self, requests: Collection[Request]) -> None:
        """Put requests at the head; the first of them becomes the head."""
        self._requests.extendleft(reversed(list(requests)))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, all in one O(n) pass."""
        gone = {request.request_id for request in requests}
        self._requests = deque(request for request in self._requests if request.request_id not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue:
    """A heap ordered by a key, by default (priority, arrival time, id), least first. No two
    requests have the same key.
    """

    def __init__(self, key: Callable[[Request], Any] = Request.sort_key) -> None:
        self._key = key
        self._heap: list[tuple[Any, Request]] = []

    def add_request(self, request: Request) -> None:
        """Add a request; its key decides its position."""
        heapq.heappush(self._heap, (self._key(request), request))

    def peek_request(self) -> Request:
        """Return the request with the least key, without removing it."""
        return self._heap[0][1]

    def pop_request(self) -> Request:
        """Remove and return the request with the least key."""
        return heapq.heappop(self._heap)[1]

    def prepend_requests(self, requests: Collection[Request]) -> None:
        """Put requests back; their keys decide where."""
        for request in requests:
            self.add_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests, all in one O(n) pass."""
        gone = {request.request_id for request in requests}
        # Keys are unique, so requests are never compared.
        self._heap = [entry for entry in self._heap if entry[1].request_id not in gone]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


RequestQueue = FCFSRequestQueue | PriorityRequestQueue


def create_request_queue(policy: str) -> RequestQueue:
    """Return a queue for the scheduling policy "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
