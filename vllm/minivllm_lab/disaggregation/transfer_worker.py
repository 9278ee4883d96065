"""What both ends of a script's transfer of blocks share: a listening socket, and a report of what has moved."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from minivllm.core.request import Request


class Worker:
    """Moves nothing. What has been sent, received or lost is told once."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[str] = SimpleQueue()
        self.received: SimpleQueue[str] = SimpleQueue()
        self.failed: SimpleQueue[str] = SimpleQueue()

    def start_load(self, reads: Sequence[Any]) -> None:
        """Begins to read, if there is anything to read."""

    def get_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose blocks were sent, received, or could not be received, since the last call."""
        sent, received, failed = (
            {queue.get() for _ in range(queue.qsize())} for queue in (self.sent, self.received, self.failed)
        )
        return sent, received, failed


class Listening:
    """A port of this machine, and a thread for each connection to it. A peer that leaves is no error."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve, self._socket = serve, socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.host, self.port = self._socket.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Ends it, and whatever it is in the middle of, as a process that dies does."""
        for one in (self._socket, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

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
    """Steps of the script's engine until all of them have ended; the first of them is returned.

    Without anything to compute, a step waits a little.
    """
    while not all(request.status.is_finished for request in requests):
        engine.step()
        time.sleep(0 if engine.running else 1e-4)
    return requests[0]
