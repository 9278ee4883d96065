"""The sockets of cores on other machines: open only to the cores that were given the keys."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import zmq
from patience import PATIENCE

from minivllm.engine.core_sockets import OwnSockets, TcpServer


@pytest.fixture
def own():
    result = OwnSockets()
    yield result
    result.close()


@pytest.fixture
def server(own):
    return TcpServer(own, "127.0.0.1")


def says_hello(sockets, own) -> zmq.Socket:
    core = own.new(zmq.DEALER)
    sockets.connect(core, "input")
    core.send(b"hello")
    return core


def test_a_core_with_the_keys_is_heard_and_answered(server, own):
    ours = server.bind(zmq.ROUTER, "input")
    core = says_hello(server.for_cores, own)
    assert ours.poll(5000)
    name, text = ours.recv_multipart()
    assert text == b"hello"
    ours.send_multipart((name, b"welcome"))
    assert core.poll(5000)
    assert core.recv() == b"welcome"


def test_strangers_are_not_heard(server, own):
    ours = server.bind(zmq.ROUTER, "input")
    without_keys = own.new(zmq.DEALER)
    without_keys.connect(server.for_cores.addresses["input"])
    without_keys.send(b"hello")
    with_another_key = says_hello(replace(server.for_cores, server_key=zmq.curve_keypair()[0]), own)
    assert not ours.poll(300)
    core = says_hello(server.for_cores, own)
    assert ours.poll(5000), "the door is not simply closed"
    assert ours.recv_multipart()[1] == b"hello"
    assert not any(item.closed for item in (without_keys, with_another_key, core))


def test_keys_are_not_shown(server):
    assert server.for_cores.server_key.decode() not in repr(server.for_cores)


def test_the_garbage_collector_can_end_them():
    """The finalizer of an unreferenced engine whose parts refer to each other must not wait
    forever.
    """

    class Client:
        pass

    client, sockets = Client(), OwnSockets()
    client.itself, client.socket = client, sockets.new(zmq.PULL)
    ended = weakref.finalize(client, sockets.close)
    del client, sockets
    collection = threading.Thread(target=gc.collect, daemon=True)
    collection.start()
    collection.join(PATIENCE)
    assert not collection.is_alive()
    assert not ended.alive
