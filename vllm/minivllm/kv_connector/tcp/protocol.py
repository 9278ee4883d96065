"""Frames over TCP between two engines that share a secret.

    frame         1 byte: refused?  ·  length of the body, 4  ·  its CRC-32, 4 (big endian)  ·  body

A connection serves one question and is closed:

    both sides          a random number each
    client ──▶ server   its proof: an HMAC of "client" and both numbers
    server ──▶ client   its own proof, an HMAC of "server" and both numbers
    client ──▶ server   an `Ask`
    server ──▶ client   an empty frame; or, for blocks, a frame for each piece of them

Neither side sends the secret. A peer that does not know it gets a line that says so, in a frame
marked as refused. The receiver knows how long each frame may be, so no length that a peer names
makes it allocate more. Each frame has `timeout` seconds. Nothing is encrypted: over networks that
others can read or write to, put it through a tunnel.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Literal

import msgspec

from minivllm.kv_connector.tcp.settings import SECRET_VARIABLE

HEADER = struct.Struct(">?II")
MOST_ASKED, MOST_REASON = 4 << 20, 4096
"""Bytes of a question, which names some 800,000 blocks at most, and of a refusal."""
NONCE_BYTES, PROOF_BYTES = 32, 32


class TransferError(RuntimeError):
    """Raised when a transfer did not succeed, for a reason outside this engine. The message is one
    line.
    """


class RefusedError(TransferError):
    """Raised when the other engine answers with a refusal and its reason: asking again would not
    help.
    """


class Ask(msgspec.Struct, frozen=True):
    """A question: send me these blocks of a request, renew its lease, or release it.

    `block_ids` must be the request's blocks starting at index `first`; `layout` describes the cache
    that will hold them.
    """

    what: Literal["read", "renew", "release"]
    request_id: str
    first: int = 0
    block_ids: list[int] = []
    layout: dict[str, str] = {}


class Connection:
    """One socket that sends and receives frames."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._socket = sock
        self._timeout = timeout
        # A small frame must not wait until there is more to send (Nagle).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, body: bytes | memoryview, refused: bool = False) -> None:
        """Send a frame. Raise `TransferError` if the peer is gone or does not accept it in time."""
        with _as_transfer_error("the other engine does not accept data"):
            self._socket.settimeout(self._timeout)  # of a whole call
            # Two calls rather than one: joining them would copy the body, which may have a
            # megabyte.
            self._socket.sendall(HEADER.pack(refused, len(body), zlib.crc32(body)))
            self._socket.sendall(body)

    def receive(self, most: int, room: memoryview | None = None) -> memoryview:
        """Receive a frame of at most `most` bytes, or of exactly `most` bytes into this `room`.

        Raises:
            RefusedError: the peer refuses; the message is its reason.
            TransferError: the peer is gone, sends nothing in time, or sends an invalid frame.
        """
        until = time.monotonic() + self._timeout
        # One deadline for header and body, so that a slow peer cannot extend it.
        refused, size, checksum = HEADER.unpack(self._filled(memoryview(bytearray(HEADER.size)), until))
        # Check the length before allocating: it is the peer's word.
        if size > (MOST_REASON if refused else most) or (room is not None and not refused and size < most):
            raise TransferError(f"a frame announces {size} bytes where {most} are due")
        body = self._filled(memoryview(bytearray(size)) if room is None or refused else room, until)
        if zlib.crc32(body) != checksum:
            raise TransferError("a frame's checksum is wrong: it was damaged on its way")
        if refused:
            raise RefusedError(str(body, errors="replace"))
        return body

    def close(self) -> None:
        """Close the connection; a thread that waits on it gets an error."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _filled(self, room: memoryview, until: float) -> memoryview:
        done = 0
        with _as_transfer_error("the other engine stopped sending"):
            while done < len(room):
                if (left := until - time.monotonic()) <= 0:  # also for a peer that sends a byte now and then
                    raise TimeoutError("timed out")
                self._socket.settimeout(left)
                if not (received := self._socket.recv_into(room[done:])):
                    raise ConnectionError("it has closed the connection")
                done += received
        return room


@contextlib.contextmanager
def _as_transfer_error(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: no host can have such a name
        raise TransferError(f"{what}: {error}") from error


def connect(host: str, port: int, timeout: float) -> Connection:
    """Connect to another engine's rank. Raise `TransferError` if nothing listens there."""
    with _as_transfer_error(f"cannot connect to {host!r}:{port}"):
        return Connection(socket.create_connection((host, port), timeout), timeout)


def authenticate(connection: Connection, secret: bytes, role: Literal["client", "server"]) -> None:
    """Prove to the peer that this side knows the secret, and check that the peer does. The server
    proves nothing to a client that has not.

    Raises:
        TransferError: the peer does not know the secret, or sends something else.
    """

    def proof(role: str) -> bytes:
        # The role is included, so that a peer cannot send a proof back as its own.
        return hmac.digest(secret, b"minivllm KV transfer 3 " + role.encode() + nonces, "sha256")

    # Both sides add a random number, so that neither proof can be recorded and sent again.
    own = secrets.token_bytes(NONCE_BYTES)
    connection.send(own)
    peer = bytes(connection.receive(NONCE_BYTES, memoryview(bytearray(NONCE_BYTES))))
    nonces = own + peer if role == "client" else peer + own
    if role == "client":
        connection.send(proof("client"))
    # The comparison takes the same time wherever they differ, so its duration tells nothing of the
    # secret.
    if not hmac.compare_digest(connection.receive(PROOF_BYTES), proof("server" if role == "client" else "client")):
        raise RefusedError(f"the two engines have different secrets ({SECRET_VARIABLE})")
    if role == "server":
        connection.send(proof("server"))
