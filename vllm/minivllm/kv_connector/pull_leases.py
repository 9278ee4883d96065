"""Keep blocks for other engines under leases, which heartbeats renew and a finished read ends.

The decode engine may die, or the request may be cancelled at the proxy, so a lease ends by itself
after `duration` seconds. Each heartbeat of a decode engine that still wants the blocks extends it
to at least two thirds of that.

In vLLM v0.33.0: `_reqs_to_send`, `_reqs_to_process`, `_handle_heartbeat` and `_get_new_notifs` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

HEARTBEATS_PER_LEASE = 6
REMEMBERED = 4096
"""Releases that are kept in mind: one may come before its lease begins, which a step in flight
has yet to tell.
"""


@dataclass(slots=True)
class _Lease:
    block_ids: tuple[int, ...]
    until: float


class Leases:
    """The requests whose blocks one rank keeps for others. Methods may be called from any thread;
    times are in seconds of `clock`.
    """

    def __init__(self, duration: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.duration = duration
        self._clock = clock
        self._kept: dict[str, _Lease] = {}
        self._released: dict[str, None] = {}  # in the order of their releases
        self._ended: set[str] = set()
        # A reader may ask for a lease that begins in the next step: it waits on this.
        self._changed = threading.Condition()

    def grant(self, block_ids: Mapping[str, Sequence[int]]) -> None:
        """Begin or restart leases of these requests' blocks. The lease of a request that has been
        released already ends at once.
        """
        with self._changed:
            for request_id, ids in block_ids.items():
                # The decode engine was faster than the step that tells this rank to keep the
                # blocks.
                if request_id in self._released:
                    self._ended.add(request_id)
                else:
                    self._kept[request_id] = _Lease(tuple(ids), self._clock() + self.duration)
            self._changed.notify_all()

    def renew(self, request_ids: Iterable[str]) -> None:
        """Renew the leases of those of these requests that have one."""
        with self._changed:
            # Shorter than a new lease: a heartbeat shows that the other engine lives, so less
            # patience is needed.
            until = self._clock() + self.duration * 2 / 3
            for lease in (self._kept[request_id] for request_id in request_ids if request_id in self._kept):
                lease.until = max(lease.until, until)

    def end(self, request_ids: Iterable[str]) -> None:
        """End the leases of these requests: their blocks were read, or are not needed."""
        with self._changed:
            for request_id in request_ids:
                if self._kept.pop(request_id, None) is not None:
                    self._ended.add(request_id)
                self._released[request_id] = None
                if len(self._released) > REMEMBERED:
                    # Dictionaries keep their order, so this is the oldest one.
                    del self._released[next(iter(self._released))]

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the requests released since the last call, and those whose lease has expired."""
        with self._changed:
            now = self._clock()
            expired = {request_id for request_id, lease in self._kept.items() if lease.until <= now}
            for request_id in expired:
                del self._kept[request_id]
            ended, self._ended = self._ended, set()
            return ended, expired

    def blocks_of(self, request_id: str, seconds: float = 0.0) -> tuple[int, ...] | None:
        """Return the blocks kept for a request, waiting up to `seconds` for its lease; None if it
        has no lease.
        """
        with self._changed:
            self._changed.wait_for(lambda: request_id in self._kept, seconds)
            lease = self._kept.get(request_id)
            return lease and lease.block_ids
