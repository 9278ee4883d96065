"""Frames over TCP between two engines: authenticated, checked in length and content, and never a pickle.

A frame is a header, a body and a payload. The body is a message of `Message`, MessagePack of at most `MOST_BODY`
bytes. The payload is raw bytes that the receiver has room for before they come: no length that a peer names makes
this side allocate.

    header    magic "mKV1" · bytes of the body, 4 · bytes of the payload, 8 · checksum of both, 8; big endian

A connection begins with a proof that both sides know the same secret, which neither sends: each gives a random
number, and answers the other's with an HMAC-SHA256 over both. The words "server" and "client" in it keep anyone from
sending a proof back. Until then a body may have 512 bytes, and everything must come within `HANDSHAKE_SECONDS`. Then
each says what engine it is (`EngineLayout`), and if keys and values of one mean nothing to the other, both get a line
that says why not. Nothing is encrypted: over networks that others can read or write to, put it through a tunnel.

Sockets block, in threads: while bytes move, the interpreter's lock is free and the forward pass goes on. Payloads go
from and to where the caller has them, in any number of parts. Every wait has an end: `timeout` seconds for each frame.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from minivllm.errors import MinivllmError
from minivllm.kv_connector.tcp.checksums import CHECKSUMS, NOTHING, Payload, common_checksum, own_checksums
from minivllm.kv_connector.tcp.secret import SECRET_VARIABLE
from minivllm.logger import init_logger

logger = init_logger(__name__)

HEADER = struct.Struct(">4sIQQ")
MAGIC = b"mKV1"
MOST_BODY = 1 << 22
"""Bytes of a body at most: some 800,000 block ids."""
_MOST_BODY_BEFORE_PROOF = 512
HANDSHAKE_SECONDS = 5.0
MOST_CONNECTIONS = 256
_NONCE_BYTES = 32
_MOST_PARTS = 512
"""Buffers in one system call; Linux and macOS take 1,024."""


class TransferError(RuntimeError):
    """A transfer that did not succeed, for a reason outside this engine. One line."""


class RefusedError(TransferError):
    """The other engine answers, and says why not: to ask again would not help."""


class EngineLayout(msgspec.Struct, frozen=True, tag=True):
    """What both sides must have alike for the bytes of one to mean the same to the other, but for `engine_id`.

    `cache`: (dtype, shape of a block) of each tensor, layer by layer.
    """

    engine_id: str
    model: str
    block_size: int
    tensor_parallel_size: int
    tensor_parallel_rank: int
    kv_cache_dtype: str
    cache: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]
    byte_order: str

    def differences(self, other: EngineLayout) -> list[str]:
        """What differs, each in words: "block_size is 16 here and 32 there"."""
        names = [name for name in self.__struct_fields__ if name not in ("engine_id", "cache")]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        found = [f"{name} is {own!r} here and {theirs!r} there" for name, own, theirs in pairs if own != theirs]
        if not found and self.cache != other.cache:
            found.append(f"the caches differ: {_in_words(self.cache)} here and {_in_words(other.cache)} there")
        return found


def _in_words(cache: tuple) -> str:
    return f"{len(cache)} layers of {list(cache[0]) if cache else 'nothing'}"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The client's first words; `tcp.checksums`: those that it can compute."""

    nonce: bytes
    checksums: list[str]


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The server's answer: its own number, the checksum to use, and its proof."""

    nonce: bytes
    checksum: str
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The client's proof."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why something is not served."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """What was asked for has been done."""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Asks for a request's blocks from the `first` on, which must be `block_ids`.

    `BlockStaging.pieces` follow, each in a frame with a `PieceSent`.
    """

    request_id: str
    first: int
    block_ids: list[int]


class PieceSent(msgspec.Struct, frozen=True, tag=True):
    """A frame whose payload is `count` blocks of a layer, from the `first` of those asked for."""

    layer: int
    first: int
    count: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """These requests have been read, or will not be."""

    request_ids: list[str]


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """These requests will still be read."""

    request_ids: list[str]


Message = Hello | Challenge | Proof | Refused | Done | EngineLayout | Read | PieceSent | Release | Heartbeat
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Connection:
    """Frames over one socket. One thread at a time may send, and one receive."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._socket = sock
        self._checksum = CHECKSUMS["crc32"]
        self._most_body = _MOST_BODY_BEFORE_PROOF
        self._until = time.monotonic() + timeout  # of the handshake
        self.timeout = timeout
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def proven(self, checksum: str, timeout: float) -> None:
        """Both sides know the secret: bodies may be longer, and this checksum is used from now on.

        Raises `TransferError` if another thread has closed the connection.
        """
        self._checksum, self._most_body = CHECKSUMS[checksum], MOST_BODY
        self._until, self.timeout = float("inf"), timeout
        try:
            self._socket.settimeout(timeout)
        except OSError as error:
            raise TransferError(f"the connection was closed meanwhile: {_reason(error)}") from error

    def send(self, message: Message, payload: Payload = NOTHING, is_valid: Callable[[], None] = lambda: None) -> None:
        """Sends a frame. Raises `TransferError` if the peer is gone, or does not take it in time.

        `is_valid` is called once the checksum is known: what changes afterwards is noticed by it. If it raises,
        nothing is sent.
        """
        body = _encoder.encode(message)
        header = HEADER.pack(MAGIC, len(body), payload.nbytes, self._sum(body, payload))
        is_valid()
        try:
            self._move(self._socket.sendmsg, [memoryview(header + body), *payload.parts])
        except OSError as error:
            raise TransferError(f"the other engine does not take what is sent: {_reason(error)}") from error

    def receive(self, room: Payload = NOTHING) -> Message:
        """Receives a frame. Its payload fills `room` exactly.

        Raises:
            TransferError: the peer is gone, sends nothing in time, or sends what is no valid frame.
        """
        magic, body_size, payload_size, checksum = HEADER.unpack(self._exactly(HEADER.size))
        if magic != MAGIC:
            raise TransferError(f"a frame begins with {magic!r}, not {MAGIC!r}: the other side speaks something else")
        if body_size > self._most_body:
            raise TransferError(f"a frame's body is said to have {body_size} bytes; {self._most_body} are allowed")
        body = self._exactly(body_size)
        message = self._decoded(body)
        if isinstance(message, Refused) and not payload_size:
            self._check(checksum, body, NOTHING)
            raise RefusedError(message.reason)
        if payload_size != room.nbytes:
            raise TransferError(f"a frame's payload is said to have {payload_size} bytes; {room.nbytes} are due")
        self._fill(room.parts)
        self._check(checksum, body, room)
        return message

    def expect(self, kind: type[Any], room: Payload = NOTHING) -> Any:
        """Receives a message of this kind. Raises `TransferError` for any other."""
        message = self.receive(room)
        if not isinstance(message, kind):
            raise TransferError(f"the other side sends {type(message).__name__} where {kind.__name__} is due")
        return message

    def wait_for_frame(self, seconds: float) -> None:
        """Returns once something has arrived. Raises `TransferError` if nothing does in time, or the peer is gone."""
        try:
            self._socket.settimeout(seconds)
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise TransferError("the other engine has closed the connection")
            self._socket.settimeout(self.timeout)
        except OSError as error:
            raise TransferError(f"the other engine is not heard of: {_reason(error)}") from error

    def close(self) -> None:
        """Closes it; a thread that waits on it gets an error."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _sum(self, body: bytes, payload: Payload) -> int:
        """One number for both: a damaged part changes it, and so do parts of another frame."""
        total = self._checksum(payload) if payload.nbytes else 0
        return (total + zlib.crc32(body)) % (1 << 64)

    def _check(self, checksum: int, body: bytes, payload: Payload) -> None:
        if self._sum(body, payload) != checksum:
            raise TransferError("a frame's checksum is wrong: it was damaged on its way")

    def _decoded(self, body: bytes) -> Message:
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise TransferError(f"a frame's body is no message: {error}") from error

    def _exactly(self, size: int) -> bytes:
        """As many bytes; `size` is bounded by the caller."""
        data = bytearray(size)
        self._fill([memoryview(data)] if size else [])
        return bytes(data)

    def _fill(self, room: list[memoryview]) -> None:
        """Fills these buffers, one after the other."""
        try:
            self._move(lambda parts: self._socket.recvmsg_into(parts)[0], room)
        except OSError as error:
            raise TransferError(f"the other engine sends nothing more: {_reason(error)}") from error

    def _move(self, move: Callable[[list[memoryview]], int], parts: list[memoryview]) -> None:
        """Calls `move` with what is left of these buffers until nothing is.

        A peer that takes or sends a byte now and then must still be done within `timeout` seconds.
        """
        deadline, first, done = min(time.monotonic() + self.timeout, self._until), 0, 0
        while first < len(parts):
            moved = move([parts[first][done:], *parts[first + 1 : first + _MOST_PARTS]])
            if not moved:
                raise TransferError("the other engine has closed the connection")
            done += moved
            while first < len(parts) and done >= len(parts[first]):
                done -= len(parts[first])
                first += 1
            if first < len(parts) and time.monotonic() > deadline:
                raise TimeoutError


def _reason(error: Exception) -> str:
    return "timed out" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)


# ---- the beginning of a connection -----------------------------------------------------------------------------------


def _proof(secret: bytes, role: str, hello: Hello, nonce: bytes, checksum: str) -> bytes:
    """What only who knows the secret can say about this connection; parts of fixed length, then the rest."""
    said = _encoder.encode((role, hello.nonce, nonce, hello.checksums, checksum))
    return hmac.digest(secret, b"minivllm KV transfer 1" + said, "sha256")


def greet(connection: Connection, secret: bytes, layout: EngineLayout, timeout: float) -> EngineLayout:
    """The client's part of the handshake; returns the server's layout.

    Raises:
        TransferError: the other side does not know the secret, or its keys and values mean nothing here.
    """
    hello = Hello(secrets.token_bytes(_NONCE_BYTES), own_checksums())
    connection.send(hello)
    challenge = connection.expect(Challenge)
    expected = _proof(secret, "server", hello, challenge.nonce, challenge.checksum)
    if not hmac.compare_digest(expected, challenge.proof) or challenge.checksum not in own_checksums():
        raise RefusedError(f"the other engine does not know this engine's secret ({SECRET_VARIABLE})")
    connection.send(Proof(_proof(secret, "client", hello, challenge.nonce, challenge.checksum)))
    connection.proven(challenge.checksum, timeout)
    connection.send(layout)
    theirs = connection.expect(EngineLayout)
    _check_layouts(layout, theirs)
    return theirs


def welcome(connection: Connection, secret: bytes, layout: EngineLayout, timeout: float) -> EngineLayout:
    """The server's part of the handshake; returns the client's layout. A client that is refused is told why."""
    hello = connection.expect(Hello)
    if len(hello.nonce) != _NONCE_BYTES:
        raise TransferError(f"a nonce of {len(hello.nonce)} bytes")
    nonce, checksum = secrets.token_bytes(_NONCE_BYTES), common_checksum(hello.checksums)
    connection.send(Challenge(nonce, checksum, _proof(secret, "server", hello, nonce, checksum)))
    proof = connection.expect(Proof).proof
    if not hmac.compare_digest(_proof(secret, "client", hello, nonce, checksum), proof):
        connection.send(Refused(f"this engine has another secret ({SECRET_VARIABLE})"))
        raise TransferError("a client does not know the secret")
    connection.proven(checksum, timeout)
    theirs = connection.expect(EngineLayout)
    connection.send(layout)
    _check_layouts(layout, theirs)
    return theirs


def _check_layouts(own: EngineLayout, theirs: EngineLayout) -> None:
    """Both sides check, so each has the line in its own log."""
    if different := own.differences(theirs):
        raise RefusedError(f"engine {theirs.engine_id} cannot exchange keys and values with this one: {different[0]}")


def connect(
    host: str, port: int, secret: bytes, layout: EngineLayout, timeout: float
) -> tuple[Connection, EngineLayout]:
    """A connection to another engine's server, and that engine's layout. Raises `TransferError`."""
    try:
        sock = socket.create_connection((host, port), timeout=min(timeout, HANDSHAKE_SECONDS))
    except OSError as error:
        raise TransferError(f"cannot connect to {host}:{port}: {_reason(error)}") from error
    except ValueError as error:  # what cannot be a host's name
        raise TransferError(f"cannot connect to {host!r}: {error}") from error
    connection = Connection(sock, min(timeout, HANDSHAKE_SECONDS))
    try:
        return connection, greet(connection, secret, layout, timeout)
    except BaseException:
        connection.close()
        raise


class TransferServer:
    """Accepts connections, and answers each in a thread of its own until `close`."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        layout: EngineLayout,
        answer: Callable[[Connection], None],
        timeout: float,
    ) -> None:
        """`answer(connection)` is called once a client has been let in, and ends with the connection.

        Raises:
            MinivllmError: the address is not this machine's, or taken.
        """
        try:
            self._listener = socket.create_server(address, backlog=64)
        except (OSError, UnicodeError) as error:
            raise MinivllmError(
                f"cannot listen on {address[0]}:{address[1]}: {_reason(error)}; set kv_connector_extra_config.host and "
                "port to an address of this machine and a free port"
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._secret, self._layout, self._answer, self._timeout = secret, layout, answer, timeout
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Connection, threading.Thread]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="kv-transfer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes all connections, and returns once their threads have ended. A second call does nothing."""
        self._closed = True
        with contextlib.suppress(OSError):  # some systems cannot shut a listener down, and wake when it is closed
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._thread.join()
        with self._lock:
            remaining = list(self._open.values())
        for connection, _ in remaining:
            connection.close()
        for _, thread in remaining:
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptor is free
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            if self._closed or len(self._open) >= MOST_CONNECTIONS:
                sock.close()
                return
            try:
                number, connection = next(self._numbers), Connection(sock, HANDSHAKE_SECONDS)
            except OSError:  # the client is gone, and some systems then set no more options
                sock.close()
                return
            thread = threading.Thread(target=self._serve, args=(number, connection), name="kv-transfer", daemon=True)
            self._open[number] = connection, thread
        thread.start()

    def _serve(self, number: int, connection: Connection) -> None:
        try:
            welcome(connection, self._secret, self._layout, self._timeout)
            self._answer(connection)
        except TransferError as error:
            if not self._closed:
                logger.debug("A connection for keys and values ends: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._open.pop(number, None)
