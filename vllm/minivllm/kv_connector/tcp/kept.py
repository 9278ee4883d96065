"""What a prefill engine keeps for others over TCP: which blocks, for which request, until when.

The worker grants leases and asks which have ended, without waiting for anybody; threads that answer other engines
renew and end them. A block that was let go of may be another request's while a thread still sends it. So the thread
asks once more between the checksum of a piece and its first byte: what is overwritten after that, the checksum tells.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.kv_connector.pull_leases import Leases, consumed_message, heartbeat_message
from minivllm.kv_connector.tcp.transport import RefusedError

SECONDS_TO_WAIT = 2.0
"""How long a read waits for the lease: the client hears of a request's end before the ranks do, in the next step."""


class KeptBlocks:
    """Leases, with the blocks. Any thread may call; times are in seconds of `clock`."""

    def __init__(self, duration: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = Leases(duration, clock)
        self._duration = duration
        self._blocks: dict[str, tuple[int, ...]] = {}  # in the order of their tokens
        self._changed = threading.Condition()

    def grant(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """Begins the leases; see `Leases.grant` for those that are told again, or were released already."""
        with self._changed:
            self._leases.grant(dict.fromkeys(blocks, self._duration))
            self._blocks.update((name, tuple(ids)) for name, ids in blocks.items())
            self._changed.notify_all()

    def heartbeat(self, request_ids: Iterable[str]) -> None:
        """Renews the leases of those that are kept."""
        with self._changed:
            self._leases.take([heartbeat_message(request_ids)])

    def end(self, request_ids: Sequence[str]) -> None:
        """Others have read them, or will not."""
        with self._changed:
            self._leases.take(consumed_message(request_id, 1) for request_id in request_ids)
            self._drop(request_ids)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose blocks are to be freed since the last call: (read or released, expired)."""
        with self._changed:
            read, expired = self._leases.take_ended()
            self._drop(read | expired)
            return read, expired

    def wait_until_kept(self, request_id: str, first: int, block_ids: Sequence[int]) -> None:
        """Returns once the lease has begun.

        Raises `RefusedError` if it does not, or if these are not its blocks from the `first` on: other tokens' keys
        and values would be used, and published, for the reader's prompt.
        """
        with self._changed:
            self._changed.wait_for(lambda: request_id in self._blocks, SECONDS_TO_WAIT)
            kept = self._blocks.get(request_id)
        if kept is None:
            raise _not_kept(request_id)
        if first < 0 or kept[first : first + len(block_ids)] != tuple(block_ids):
            raise RefusedError(f"request {request_id!r} has other blocks than those that are asked for")

    def check(self, request_id: str) -> None:
        """Renews a lease. Raises `RefusedError` if it has ended: the blocks may be another request's."""
        with self._changed:
            if request_id not in self._blocks:
                raise _not_kept(request_id)
            self._leases.take([heartbeat_message([request_id])])

    def _drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._blocks.pop(request_id, None)


def _not_kept(request_id: str) -> RefusedError:
    return RefusedError(
        f"the blocks of request {request_id!r} are not kept: they were read, released, or not asked for in time"
    )
