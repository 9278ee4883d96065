"""The sockets of cores on other machines: open to the cores that were given the keys, and to nobody else."""

from dataclasses import replace

import pytest
import zmq

from minivllm.engine.core_sockets import TcpServer


@pytest.fixture
def context():
    found = zmq.Context()
    yield found
    found.destroy(linger=0)


@pytest.fixture
def server(context):
    return TcpServer(context, "127.0.0.1")


def says_hello(sockets, context) -> zmq.Socket:
    core = context.socket(zmq.DEALER)
    core.linger = 0
    sockets.connect(core, "input-0")
    core.send(b"hello")
    return core


def test_a_core_with_the_keys_is_heard_and_answered(server, context):
    ours = server.bind(zmq.ROUTER, "input-0")
    core = says_hello(server.for_cores, context)
    assert ours.poll(5000)
    name, text = ours.recv_multipart()
    assert text == b"hello"
    ours.send_multipart((name, b"welcome"))
    assert core.poll(5000)
    assert core.recv() == b"welcome"


def test_strangers_are_not_heard(server, context):
    ours = server.bind(zmq.ROUTER, "input-0")
    without_keys = context.socket(zmq.DEALER)
    without_keys.linger = 0
    without_keys.connect(server.for_cores.addresses["input-0"])
    without_keys.send(b"hello")
    with_another_key = says_hello(replace(server.for_cores, server_key=zmq.curve_keypair()[0]), context)
    assert not ours.poll(300)
    core = says_hello(server.for_cores, context)
    assert ours.poll(5000), "the door is not simply closed"
    assert ours.recv_multipart()[1] == b"hello"
    assert not any(one.closed for one in (without_keys, with_another_key, core))


def test_keys_are_not_shown(server):
    assert server.for_cores.server_key.decode() not in repr(server.for_cores)
