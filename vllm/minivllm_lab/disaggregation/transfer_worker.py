"""Both ends of lesson 08's transfer of blocks: a listening socket, and a record of what has
moved.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from minivllm.core.request import Request


@dataclass
class Read:
    """A request to copy a peer's `remote_block_ids` into our `block_ids` and then to notify the
    peer; without blocks, only to notify it.
    """

    request_id: str
    params: dict[str, Any]
    block_ids: list[int] = field(default_factory=list)
    remote_block_ids: list[int] = field(default_factory=list)


class Worker:
    """A base worker that moves nothing itself, and reports once what was sent, received or lost."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[str] = SimpleQueue()
        self.received: SimpleQueue[str] = SimpleQueue()
        self.failed: SimpleQueue[str] = SimpleQueue()

    def start_load(self, reads: Sequence[Read]) -> None:
        """Begin all reads, each in a thread, and return at once."""
        for read in reads:
            threading.Thread(target=self.read, args=(read,), daemon=True).start()

    def read(self, read: Read) -> None:
        """Read blocks; only workers that receive override this."""

    def get_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests whose blocks were sent, received or lost since the last call."""
        sent, received, failed = (
            {queue.get() for _ in range(queue.qsize())} for queue in (self.sent, self.received, self.failed)
        )
        return sent, received, failed


class Listening:
    """A listening port with a thread for each connection; a peer that disconnects is not an error."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve, self._socket = serve, socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.address = dict(zip(("remote_host", "remote_port"), self._socket.getsockname(), strict=True))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close the port and all its connections, as a dying process would."""
        for each in (self._socket, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def _serve_one(self, connection: socket.socket) -> None:
        self._open.add(connection)
        with suppress(OSError, ValueError), connection:
            self._serve(connection)
        self._open.discard(connection)


def until_finished(engine: Any, *requests: Request) -> Request:
    """Step the lesson's engine until all these requests have ended; return the first of them."""
    while not all(request.status.is_finished for request in requests):
        engine.step()
        time.sleep(0 if engine.running else 1e-4)  # do not spin while blocks are on their way
    return requests[0]


def as_blocks(data: bytearray, cache: Tensor, block_ids: Sequence[int]) -> Tensor:
    """View received bytes as blocks of this cache, [blocks, tensors, ...], on its device.

    Raises:
        ConnectionError: their number is not that of these blocks.
    """
    if len(data) != cache[:, block_ids].nbytes:
        raise ConnectionError("the blocks did not arrive whole")
    shape = len(block_ids), len(cache), *cache.shape[2:]
    return torch.frombuffer(data, dtype=cache.dtype).view(shape).to(cache.device)


def send_data(connection: socket.socket, staging: Tensor) -> None:
    """Send the length of a tensor in bytes, and then the bytes."""
    data = staging.cpu().flatten().view(torch.uint8).numpy().data
    connection.sendall(len(data).to_bytes(8, "big"))
    connection.sendall(data)
