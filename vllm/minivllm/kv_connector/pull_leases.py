"""How long a prefill engine keeps blocks for others: a lease, renewed by heartbeats, ended by a notification.

Nobody is trusted to come back: the decode engine may have died, or the request may have been cancelled at the proxy.
So blocks are kept for `duration` seconds at first. Heartbeats, which the decode engine sends for each request that it
holds, however long that waits, renew the lease by two thirds of that. The notification that all was read ends it.

In vLLM v0.33.0: `_reqs_to_send`, `_reqs_to_process`, `_handle_heartbeat` and `_get_new_notifs` in
`vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py`.
"""

import time
from collections.abc import Callable, Iterable, Mapping

HEARTBEAT = b"HB:"
HEARTBEATS_PER_LEASE = 6
REMEMBERED = 4096
"""Notifications that are kept in mind. With steps in flight one may come before its lease begins."""


def heartbeat_message(request_ids: Iterable[str]) -> bytes:
    """The notification that renews the leases of these requests."""
    return HEARTBEAT + ",".join(sorted(request_ids)).encode()


def consumed_message(request_id: str, tensor_parallel_size: int) -> bytes:
    """The notification that a rank has all that it wanted of a request."""
    return f"{request_id}:{tensor_parallel_size}".encode()


class Leases:
    """The requests whose blocks one rank keeps for others. Times are in seconds of `clock`."""

    def __init__(self, duration: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.extension = duration * 2 / 3
        self._clock = clock
        self._until: dict[str, float] = {}
        self._consumed: dict[str, None] = {}  # in order of their notifications
        self._ended: set[str] = set()

    def __len__(self) -> int:
        return len(self._until)

    def grant(self, seconds: Mapping[str, float]) -> None:
        """Begins the leases. One that is granted twice begins anew; one that was read already ends at once."""
        now = self._clock()
        for request_id, left in seconds.items():
            if request_id in self._consumed:
                self._ended.add(request_id)
            else:
                self._until[request_id] = now + left

    def take(self, messages: Iterable[bytes]) -> None:
        """Takes in notifications. What it does not understand, or is of no request here, changes nothing."""
        for message in messages:
            if message.startswith(HEARTBEAT):
                self._renew(message.removeprefix(HEARTBEAT).decode(errors="replace").split(","))
            else:
                self._consume(message.decode(errors="replace").rpartition(":")[0])

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Returns the requests that were read, and those whose lease has run out, since the last call.

        Call `take` before: a heartbeat may have arrived in time.
        """
        now = self._clock()
        expired = {request_id for request_id, until in self._until.items() if until <= now}
        for request_id in expired:
            del self._until[request_id]
        ended, self._ended = self._ended, set()
        return ended, expired

    def _renew(self, request_ids: Iterable[str]) -> None:
        until = self._clock() + self.extension
        for request_id in request_ids:
            if request_id in self._until:
                self._until[request_id] = max(self._until[request_id], until)

    def _consume(self, request_id: str) -> None:
        if self._until.pop(request_id, None) is not None:
            self._ended.add(request_id)
        self._consumed[request_id] = None
        if len(self._consumed) > REMEMBERED:
            del self._consumed[next(iter(self._consumed))]
