"""Frames between two sockets: hostile ones, wrong secrets, and how much a peer can make this side do."""

import socket
import threading
import time
import zlib
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE

from minivllm.kv_connector.tcp import transport
from minivllm.kv_connector.tcp.checksums import CHECKSUMS, Payload, common_checksum, crc32, xxh64
from minivllm.kv_connector.tcp.transport import (
    HEADER,
    MAGIC,
    Challenge,
    Connection,
    Done,
    EngineLayout,
    Hello,
    PieceSent,
    Proof,
    Read,
    RefusedError,
    TransferError,
    TransferServer,
    connect,
)

SECRET = b"known to both of them"
LAYOUT = EngineLayout("an engine", "a model", 4, 1, 0, "float32", ((("float32", (4, 2, 8)),),), "little")


def pair(timeout=PATIENCE):
    """Two ends of a connection that is past its handshake."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    ends = [Connection(client, timeout), Connection(listener.accept()[0], timeout)]
    listener.close()
    for end in ends:
        end.proven("xxh64", timeout)
    return ends


@contextmanager
def server(answer=lambda connection: connection.send(Done()), layout=LAYOUT, timeout=PATIENCE):
    one = TransferServer(("127.0.0.1", 0), SECRET, layout, answer, timeout)
    try:
        yield one
    finally:
        one.close()


def frame(body, payload=b"", /, **changed):
    fields = {"magic": MAGIC, "body": len(body), "payload": len(payload), "sum": zlib.crc32(body), **changed}
    return HEADER.pack(*fields.values()) + body + payload


def raw(to):
    sock = socket.create_connection(("127.0.0.1", to.port), timeout=PATIENCE)
    sock.settimeout(PATIENCE)
    return sock


def is_closed(sock):
    """Whether the other side closes it without another word."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("data", "total"),
    [
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64_is_the_published_one(data, total):
    assert xxh64(Payload.of(data)) == total


@given(st.binary(min_size=1, max_size=200), st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_byte_changes_the_checksum(data, drawn):
    place, change = drawn.draw(st.integers(0, len(data) - 1)), drawn.draw(st.integers(1, 255))
    damaged = bytearray(data)
    damaged[place] ^= change
    for checksum in CHECKSUMS.values():
        assert checksum(Payload.of(data)) != checksum(Payload.of(damaged))


def test_parts_that_change_places_change_the_checksum():
    assert xxh64(Payload.of(b"one", b"two")) != xxh64(Payload.of(b"two", b"one"))
    assert crc32(Payload.of(b"one", b"two")) == zlib.crc32(b"onetwo")


def test_both_sides_use_what_both_have():
    assert common_checksum(["crc32"]) == "crc32"
    assert common_checksum(["crc32", "xxh64", "another"]) == "xxh64"
    assert set(CHECKSUMS) == {"xxh64", "crc32"}


def test_a_message_and_its_payload_come_as_they_were():
    here, there = pair()
    payload, rooms = bytes(range(256)) * 4096, [bytearray(1000) for _ in range(1048)]
    parts = [payload[at : at + 1000] for at in range(0, 1048_000, 1000)]
    sender = threading.Thread(target=here.send, args=(PieceSent(3, 4, 5), Payload.of(*parts)))
    sender.start()
    assert there.expect(PieceSent, Payload.of(*rooms)) == PieceSent(3, 4, 5)
    sender.join()
    assert rooms == parts
    there.send(Read("r", 7, list(range(100_000))))
    assert here.expect(Read).block_ids[-1] == 99_999


@given(st.binary(max_size=80))
@settings(max_examples=80, deadline=None)
def test_whatever_comes_is_a_message_or_an_error(data):
    here, there = pair(0.2)
    here._socket.sendall(data)
    here.close()
    with pytest.raises(TransferError):
        there.receive()
    there.close()


@given(st.binary(max_size=60))
@settings(max_examples=80, deadline=None)
def test_a_body_that_is_no_message(body):
    here, there = pair(0.2)
    here._socket.sendall(frame(body))
    with pytest.raises(TransferError, match=r"no message|checksum"):
        there.receive()
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"magic": b"GET "}, "speaks something else"),
        ({"body": (1 << 22) + 1}, "4194304 are allowed"),
        ({"body": 0xFFFFFFFF}, "4194304 are allowed"),
        ({"payload": 1 << 62}, "0 are due"),
        ({"sum": 1}, "checksum is wrong"),
    ],
)
def test_lengths_and_sums_are_checked_before_anything_is_allocated(changed, said):
    here, there = pair()
    here._socket.sendall(frame(msgspec.msgpack.encode(Done()), **changed))
    with pytest.raises(TransferError, match=said):
        there.receive()


def test_a_payload_of_another_size_than_is_due():
    here, there = pair()
    here.send(PieceSent(0, 0, 1), Payload.of(b"12345678"))
    with pytest.raises(TransferError, match="8 bytes; 9 are due"):
        there.receive(Payload.of(bytearray(9)))


def test_a_part_of_another_frame_is_noticed():
    """Body and payload are both whole, and each has been sent, but not together."""
    here, there = pair()
    body, payload = msgspec.msgpack.encode(PieceSent(0, 0, 1)), b"12345678"
    total = (xxh64(Payload.of(payload)) + zlib.crc32(msgspec.msgpack.encode(PieceSent(1, 0, 1)))) % (1 << 64)
    here._socket.sendall(HEADER.pack(MAGIC, len(body), len(payload), total) + body + payload)
    with pytest.raises(TransferError, match="checksum"):
        there.receive(Payload.of(bytearray(8)))


def test_a_peer_that_sends_a_byte_now_and_then_is_not_waited_for():
    here, there = pair(0.3)
    stop = threading.Event()

    def drip():
        while not stop.is_set():
            here._socket.sendall(b"m")
            time.sleep(0.05)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TransferError, match="timed out"):  # a header of these bytes would be refused
        there.receive(Payload.of(bytearray(100)))
    stop.set()
    dripping.join()


def test_a_peer_that_takes_nothing_is_not_waited_for():
    here, there = pair(0.3)
    with pytest.raises(TransferError, match="does not take"):
        here.send(PieceSent(0, 0, 1), Payload.of(bytes(1 << 25)))
    there.close()


def test_both_sides_know_the_secret():
    with server() as to:
        connection, theirs = connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)
        assert theirs == LAYOUT
        assert isinstance(connection.receive(), Done)
        connection.close()


def test_another_secret_is_refused_on_both_sides():
    with server() as to, pytest.raises(RefusedError, match="does not know this engine's secret"):
        connect("127.0.0.1", to.port, b"something else entirely", LAYOUT, PATIENCE)


def test_a_client_without_the_secret_gets_nothing():
    """Also one that sends the server's own proof back, or proofs of other connections."""
    reached = []
    with server(answer=reached.append) as to:
        for proof in (b"", bytes(32), None):
            sock = raw(to)
            connection = Connection(sock, 5)
            connection.send(Hello(bytes(32), ["crc32"]))
            challenge = connection.expect(Challenge)
            connection.send(Proof(challenge.proof if proof is None else proof))
            with pytest.raises(TransferError, match="another secret"):
                connection.receive()
            assert is_closed(sock)
    assert not reached


def test_two_handshakes_never_have_the_same_proof():
    proofs = set()
    with server() as to:
        for _ in range(5):
            connection = Connection(raw(to), 5)
            connection.send(Hello(bytes(32), ["crc32"]))
            proofs.add(connection.expect(Challenge).proof)
            connection.close()
    assert len(proofs) == 5


def test_a_server_that_does_not_know_the_secret_is_left():
    """The client sends nothing that could be used elsewhere."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pose():
        connection = Connection(listener.accept()[0], 5)
        connection.expect(Hello)
        connection.send(Challenge(bytes(32), "crc32", bytes(32)))
        with pytest.raises(TransferError):
            connection.receive()

    posing = threading.Thread(target=pose)
    posing.start()
    with pytest.raises(RefusedError, match="does not know"):
        connect(*listener.getsockname(), SECRET, LAYOUT, PATIENCE)
    posing.join()
    listener.close()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n\r\n" * 3, frame(b"\xff" * 513), frame(b"\xc0")])
def test_strangers_do_not_hold_up_others(first, monkeypatch):
    """What they send is dropped, or what they do not send is not waited for; meanwhile others are served."""
    monkeypatch.setattr(transport, "HANDSHAKE_SECONDS", 0.3)
    with server() as to:
        strangers = [raw(to) for _ in range(10)]
        for sock in strangers:
            sock.sendall(first)
        connection, _ = connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)
        assert isinstance(connection.receive(), Done)
        assert all(is_closed(sock) for sock in strangers)


def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(transport, "MOST_CONNECTIONS", 3)
    before = threading.active_count()
    with server() as to:
        first = [raw(to) for _ in range(3)]
        time.sleep(0.1)
        assert is_closed(raw(to))
        assert threading.active_count() <= before + 4
        for sock in first:
            sock.close()


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransferError, match=rf"cannot connect to 127.0.0.1:{port}: Connection refused"):
        connect("127.0.0.1", port, SECRET, LAYOUT, PATIENCE)


def test_closing_ends_every_thread():
    before = threading.active_count()
    with server(answer=lambda connection: connection.wait_for_frame(60)) as to:
        connections = [connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)[0] for _ in range(3)]
        assert threading.active_count() == before + 4
    assert threading.active_count() == before
    with pytest.raises(TransferError):
        connections[0].receive()


@pytest.mark.parametrize(
    ("before", "call"), [("expect", 1), ("send", 1), ("expect", 2), ("proven", 1), ("expect", 3), ("send", 2)]
)
def test_closing_in_the_middle_of_a_handshake_ends_it_quietly(before, call, monkeypatch):
    """Another thread closes the connection just before the server's thread uses it."""
    calls, failures, method = [], [], getattr(Connection, before)

    def closes_first(self, *arguments):
        if threading.current_thread().name == "kv-transfer":
            calls.append(threading.current_thread())
            if len(calls) == call:
                self.close()
        return method(self, *arguments)

    monkeypatch.setattr(threading, "excepthook", failures.append)
    monkeypatch.setattr(Connection, before, closes_first)
    with server() as to, pytest.raises(TransferError):
        connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)
    for thread in calls:
        thread.join()
    assert len(calls) == call
    assert not failures


def test_a_client_that_is_gone_before_its_connection_is_set_up_does_not_end_the_server(monkeypatch):
    """Some systems then set no more options of the socket."""
    refused, init = [], Connection.__init__

    def refuses_once(self, sock, timeout):
        if not refused and threading.current_thread().name == "kv-transfer-accept":
            refused.append(sock)
            raise OSError(22, "Invalid argument")
        init(self, sock, timeout)

    monkeypatch.setattr(Connection, "__init__", refuses_once)
    with server() as to:
        assert is_closed(raw(to))
        connection, _ = connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)
        assert isinstance(connection.receive(), Done)
        connection.close()


def test_the_layouts_are_compared_on_both_sides():
    other = msgspec.structs.replace(LAYOUT, block_size=16)
    with server(layout=other) as to, pytest.raises(RefusedError, match="block_size is 4 here and 16 there"):
        connect("127.0.0.1", to.port, SECRET, LAYOUT, PATIENCE)
