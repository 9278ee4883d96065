"""Another engine as a decode engine's rank sees it over TCP: a thread reads from it, another says what is wanted.

A transfer of many bytes on one connection must not hold up the heartbeats that keep other requests' blocks, so those
have a connection of their own. Connections are made when they are needed, kept, and made anew once when they break: a
read can be repeated, for the blocks stay until they are released.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from minivllm.kv_connector.tcp.staging import BlockStaging, Piece, StagingBuffer
from minivllm.kv_connector.tcp.transport import (
    Connection,
    Done,
    Heartbeat,
    PieceSent,
    Read,
    RefusedError,
    Release,
    TransferError,
)
from minivllm.logger import init_logger

logger = init_logger(__name__)
TRIES = 2
"""New connections for a read or a word."""


class Load:
    """A request's blocks on their way, layer by layer. The worker waits and cancels, the peer's thread moves it on."""

    def __init__(
        self, request_id: str, remote_request_id: str, first: int, remote: Sequence[int], local: Sequence[int]
    ) -> None:
        """Block `remote[i]` of the other engine, its request's `first` + i, goes to `local[i]` of this one."""
        self.request_id, self.remote_request_id = request_id, remote_request_id
        self.first, self.remote, self.local = first, list(remote), list(local)
        self.error: str | None = None
        self.seconds = 0.0
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._connection: Connection | None = None
        self._layers = 0
        self._is_over = self._is_cancelled = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_over

    def write(self, connection: Connection, function: Callable[[], None]) -> None:
        """Calls a function that writes what this connection receives into the cache.

        Raises `RefusedError` if the load was cancelled.
        """
        with self._writing:
            self._connection = connection
            if self._is_cancelled:
                raise RefusedError("it was cancelled")
            function()
            self._connection = None

    def layers_are_there(self, count: int) -> None:
        """The first `count` layers are in the cache."""
        with self._changed:
            self._layers = count
            self._changed.notify_all()

    def end(self, error: str | None, seconds: float) -> None:
        """It has ended."""
        with self._changed:
            self.error, self.seconds, self._is_over = error, seconds, True
            self._changed.notify_all()

    def cancel(self) -> None:
        """Nothing is written into the cache once this returns."""
        self._is_cancelled = True
        if connection := self._connection:
            connection.close()  # ends what is being received
        with self._writing:
            return

    def wait_for_layers(self, count: int) -> bool:
        """Waits until `count` layers are there; False if it has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._layers >= count)
            return self.error is None


class RemoteEngine:
    """One rank of another engine."""

    def __init__(self, connect: Callable[[], Connection], staging: BlockStaging) -> None:
        """`connect` gives a connection that is past its handshake, or raises `TransferError`."""
        self._connect, self._staging = connect, staging
        self._loads: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._words: queue.SimpleQueue[tuple[Heartbeat | Release, Callable[[], None]] | None] = queue.SimpleQueue()
        self._open: dict[str, Connection] = {}
        self._closed = False
        self._under_way: set[object] = set()
        self._threads = [
            threading.Thread(target=target, name=f"kv-transfer-{name}", daemon=True)
            for name, target in (("read", self._read_loads), ("tell", self._tell_words))
        ]
        for thread in self._threads:
            thread.start()

    def read(self, load: Load) -> None:
        """Begins a load, after those before it."""
        self._under_way.add(load)
        self._loads.put(load)

    def tell(self, word: Heartbeat | Release, then: Callable[[], None] = lambda: None) -> None:
        """Sends a word if it can; `then` is called in any case, once it was taken in or given up."""
        item = word, then
        self._under_way.add(id(item))
        self._words.put(item)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to read and nothing to tell."""
        return not self._under_way

    def retire(self) -> None:
        """Lets both threads end, without waiting for them."""
        self._closed = True
        self._loads.put(None)
        self._words.put(None)

    def close(self) -> None:
        """Ends both threads; a load under way fails. A second call does nothing."""
        self.retire()
        for connection in list(self._open.values()):
            connection.close()
        for thread in self._threads:
            thread.join()

    def _read_loads(self) -> None:
        buffer = StagingBuffer(self._staging)
        while (load := self._loads.get()) is not None and not self._closed:
            start = time.monotonic()
            error = self._tried("read", lambda connection, load=load: self._read(connection, load, buffer))
            load.end(error, time.monotonic() - start)
            if error is None:
                self._tried("read", lambda connection, load=load: _told(connection, Release([load.remote_request_id])))
            else:
                self.tell(Release([load.remote_request_id]))
            self._under_way.discard(load)
        self._drop("read")

    def _read(self, connection: Connection, load: Load, buffer: StagingBuffer) -> None:
        ids = self._staging.ids(load.local)
        connection.send(Read(load.remote_request_id, load.first, load.remote))
        for piece in self._staging.pieces(len(load.remote)):
            load.write(connection, functools.partial(_receive, connection, piece, ids, buffer))
            if piece.first + piece.count == len(load.remote):
                load.layers_are_there(piece.layer + piece.layers)

    def _tell_words(self) -> None:
        while (item := self._words.get()) is not None and not self._closed:
            word, then = item
            error = self._tried("tell", lambda connection, word=word: _told(connection, word))
            if error is not None:
                logger.warning("Another engine could not be told what is wanted (%s); its leases will end", error)
            then()
            self._under_way.discard(id(item))
        self._drop("tell")

    def _tried(self, name: str, act: Callable[[Connection], None]) -> str | None:
        """Acts on a connection, and once more on a new one if it breaks. Returns why it failed, or None.

        One that was kept may be dead already, as after the other engine's end, so that one is tried besides.
        """
        error = "the connector was shut down"
        for _ in range(TRIES + (name in self._open)):
            if self._closed:
                return error
            try:
                if name not in self._open:
                    self._open[name] = self._connect()
                if self._closed:  # meanwhile
                    break
                act(self._open[name])
                return None
            except RefusedError as refusal:
                self._drop(name)
                return str(refusal)
            except TransferError as failure:
                self._drop(name)
                error = str(failure)
            except Exception as failure:  # the thread serves other requests too, and must outlive this one
                self._drop(name)
                return f"{type(failure).__name__}: {failure}"
        return error

    def _drop(self, name: str) -> None:
        if connection := self._open.pop(name, None):
            connection.close()


def _receive(connection: Connection, piece: Piece, ids: torch.Tensor, buffer: StagingBuffer) -> None:
    sent = connection.expect(PieceSent, buffer.room(piece, ids))
    if (sent.layer, sent.first, sent.count) != (piece.layer, piece.first, piece.count):
        raise TransferError(f"the other engine sends {sent} where {piece} is due")
    buffer.scatter(piece, ids)


def _told(connection: Connection, word: Heartbeat | Release) -> None:
    connection.send(word)
    connection.expect(Done)
