"""Frames between two sockets: hostile ones, wrong secrets, and how much work a peer can cause on
this side.
"""

import hmac
import socket
import threading
import time
import zlib
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_connector.tcp_doubles import SECRET, Engine
from patience import PATIENCE

from minivllm.kv_connector.tcp import protocol
from minivllm.kv_connector.tcp import worker as tcp_worker
from minivllm.kv_connector.tcp.protocol import HEADER, MOST_ASKED, Ask, Connection, RefusedError, TransferError

OWN = SECRET.encode()


def pair(timeout=PATIENCE):
    """Open a connection; return its two ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    ends = [Connection(client, timeout), Connection(listener.accept()[0], timeout)]
    listener.close()
    return ends


@contextmanager
def prefill_engine(**extra):
    engine = Engine("P", extra)
    try:
        yield engine, engine.worker.get_handshake_metadata()
    finally:
        engine.close()


def raw(port):
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def ask(port, question, secret=OWN):
    """Connect, send this question, and return the connection."""
    connection = protocol.connect("127.0.0.1", port, PATIENCE)
    protocol.authenticate(connection, secret, "client")
    connection.send(question if isinstance(question, bytes) else msgspec.msgpack.encode(question))
    return connection


def is_closed(sock):
    """Return whether the peer closes the connection; anything it sends before is ignored."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def frame(body, **changed):
    fields = {"refused": False, "size": len(body), "sum": zlib.crc32(body), **changed}
    return HEADER.pack(*fields.values()) + body


def test_a_frame_comes_as_it_was():
    here, peer = pair()
    data, room = bytes(range(256)) * 8192, memoryview(bytearray(256 * 8192))
    sender = threading.Thread(target=here.send, args=(data,))
    sender.start()
    assert peer.receive(len(room), room) is room
    sender.join()
    assert bytes(room) == data
    peer.send(b"a word")
    assert bytes(here.receive(MOST_ASKED)) == b"a word"
    peer.send(b"")
    assert bytes(here.receive(0)) == b""


def receive_all(connection):
    """Receive frames until that raises: an empty frame is nine zeros, so a few may be valid."""
    while True:
        connection.receive(16)


@given(st.binary(max_size=80))
@settings(max_examples=40, deadline=None)
def test_whatever_comes_is_a_frame_or_an_error(data):
    here, peer = pair(0.2)
    here._socket.sendall(data)
    here.close()
    with pytest.raises(TransferError):
        receive_all(peer)
    peer.close()


WORDS = b"12345678"


@pytest.mark.parametrize(
    ("sent", "has_room", "said"),
    [
        (frame(WORDS, size=MOST_ASKED + 1), False, f"{MOST_ASKED} are due"),
        (frame(WORDS, size=0xFFFFFFFF), False, f"{MOST_ASKED} are due"),
        (frame(WORDS, size=0xFFFFFFFF, refused=True), False, "4294967295 bytes"),
        (frame(WORDS, sum=1), False, "checksum is wrong"),
        (frame(WORDS[:7]), True, "7 bytes where 8 are due"),
        (frame(WORDS + b"9"), True, "9 bytes where 8 are due"),
        (b"", True, "it has closed the connection"),
        (frame(WORDS)[:5], True, "it has closed the connection"),
        (frame(WORDS)[:-1], True, "it has closed the connection"),
    ],
)
def test_sizes_and_sums_are_checked_before_anything_is_allocated(sent, has_room, said):
    here, peer = pair()
    here._socket.sendall(sent)
    here.close()
    with pytest.raises(TransferError, match=said):
        peer.receive(8, memoryview(bytearray(8))) if has_room else peer.receive(MOST_ASKED)


def test_a_peer_that_sends_a_byte_now_and_then_is_not_waited_for():
    here, peer = pair(0.3)
    stop = threading.Event()

    def drip():
        here._socket.sendall(frame(bytes(100))[:-100])
        while not stop.is_set():
            here._socket.sendall(b"m")
            time.sleep(0.05)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TransferError, match="timed out"):
        peer.receive(100)
    stop.set()
    dripping.join()


def test_a_peer_that_takes_nothing_is_not_waited_for():
    here, peer = pair(0.3)
    with pytest.raises(TransferError, match="does not accept"):
        here.send(bytes(1 << 25))
    peer.close()


def test_a_client_without_the_secret_gets_nothing():
    """A client that knows half of the protocol gets nothing either."""
    challenges = set()
    with prefill_engine() as (_, port):
        for answer in (b"", bytes(32), None, bytes(31)):
            connection = Connection(raw(port), 5)
            nonce = bytes(connection.receive(32))
            challenges.add(nonce)
            connection.send(nonce)
            connection.send(hmac.digest(OWN, nonce, "sha256") if answer is None else answer)
            with pytest.raises(RefusedError, match="different secrets"):
                connection.receive(32)
            assert is_closed(connection._socket)
    assert len(challenges) == 4, "no connection has the challenge of another"


def test_a_server_that_does_not_know_the_secret_is_left():
    """The client asks nothing, and gives no proof that could be sent back to it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pose():
        connection = Connection(listener.accept()[0], 5)
        connection.send(bytes(32))
        connection.receive(32)
        connection.send(connection.receive(32))
        with pytest.raises(TransferError):
            connection.receive(MOST_ASKED)

    posing = threading.Thread(target=pose)
    posing.start()
    connection = protocol.connect(*listener.getsockname(), PATIENCE)
    with pytest.raises(RefusedError, match="different secrets"):
        protocol.authenticate(connection, OWN, "client")
    connection.close()
    posing.join()
    listener.close()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, frame(b"\xff" * 65), frame(b"\xc0")])
def test_strangers_do_not_hold_up_others(first):
    """Garbage is dropped and silent clients are not waited for; others are served meanwhile."""
    with prefill_engine(timeout=0.3) as (_, port):
        strangers = [raw(port) for _ in range(10)]
        for sock in strangers:
            sock.sendall(first)
        assert bytes(ask(port, Ask("renew", "x")).receive(0)) == b""
        assert all(is_closed(sock) for sock in strangers)


@pytest.mark.parametrize("question", [b"", b"\xc0", b"{}", msgspec.msgpack.encode({"what": "x", "request_id": ""})])
def test_what_is_no_question_is_refused(question):
    with prefill_engine() as (_, port), pytest.raises(RefusedError):
        ask(port, question).receive(0)


def test_threads_are_bounded():
    before = threading.active_count()
    with prefill_engine() as (_, port):
        strangers = [raw(port) for _ in range(3 * tcp_worker.ANSWERERS)]
        time.sleep(0.2)
        assert threading.active_count() <= before + tcp_worker.ANSWERERS + 1  # which accepts
        for sock in strangers:
            sock.close()
        assert bytes(ask(port, Ask("renew", "x")).receive(0)) == b""
    assert threading.active_count() <= before


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match=rf"cannot connect to '127.0.0.1':{port}: .*Connection refused"):
        protocol.connect("127.0.0.1", port, PATIENCE)
