"""The side channel over real sockets: vLLM's messages, and anything else that may arrive."""

import time

import msgspec
import pytest
import zmq
from kv_connector.nixl_doubles import CONFIG, config_of, make_caches
from patience import PATIENCE
from refusals import assert_refused
from server.serving import free_port

from minivllm.kv_connector.nixl import side_channel
from minivllm.kv_connector.pull_worker import layout_of

METADATA = side_channel.NixlAgentMetadata("engine", b"agent", [4096, 8192], 0, 16, [64, 64], "generation")
HASH = side_channel.compute_nixl_compatibility_hash(layout_of(CONFIG, make_caches(CONFIG, False)))
PAYLOAD = msgspec.msgpack.encode(side_channel.NixlHandshakePayload(HASH, msgspec.msgpack.encode(METADATA)))


@pytest.fixture
def port():
    port = free_port()
    channel = side_channel.NixlSideChannel("127.0.0.1", port, {0: PAYLOAD}, {"held"}.__contains__)
    yield port
    channel.close()
    channel.close()


def exchange(port: int, frames: list[bytes]) -> list[bytes]:
    """Send frames as any client of ZMQ's REQ would; return the answer."""
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.linger, client.rcvtimeo = 0, 60_000
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send_multipart(frames)
        return client.recv_multipart()


def test_a_handshake_brings_the_metadata(port):
    assert side_channel.fetch_metadata("127.0.0.1", port, 0, HASH, PATIENCE) == METADATA
    assert_refused("has no rank 3", side_channel.fetch_metadata, "127.0.0.1", port, 3, HASH, PATIENCE)


def test_what_it_does_not_know_has_an_empty_answer_and_ends_nothing(port):
    questions = ((b"get_meta_msg", "0", 0), (b"get_meta_msg", 0), {"get_meta_msg": 0}, (b"get_meta_msg", 0, 7))
    unknown = [msgspec.msgpack.encode(question) for question in (*questions, (b"is_held_msg", 1))]
    for frames in ([b""], [b"\xc1"], [b"get_meta_msg"], [b"a", b"b", b"c"], *([frame] for frame in unknown)):
        assert exchange(port, frames) == [b""], frames
    assert exchange(port, [msgspec.msgpack.encode((b"get_meta_msg", 0, 0))]) == [PAYLOAD]


def test_it_says_whose_blocks_are_kept(port):
    assert side_channel.ask_is_held("127.0.0.1", port, "held", PATIENCE)
    assert not side_channel.ask_is_held("127.0.0.1", port, "another", PATIENCE)


def test_nobody_there_is_a_matter_of_time():
    began = time.perf_counter()
    assert_refused(r"did not answer within 0\.2 s", side_channel.fetch_metadata, "127.0.0.1", free_port(), 0, HASH, 0.2)
    assert time.perf_counter() - began < PATIENCE / 2


@pytest.mark.parametrize(
    ("other", "shape"),
    [
        ({"model_fingerprint": "b"}, {}), ({}, {"num_layers": 3}), ({}, {"num_kv_heads": 4}), ({"block_size": 8}, {}),
        ({"device": "cuda"}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_incompatible_engines_are_refused_before_their_metadata_is_decoded(port, other, shape):
    def hash_of(config, **shape):
        return side_channel.compute_nixl_compatibility_hash(layout_of(config, make_caches(config, False, **shape)))

    own = hash_of(config_of(**other), **shape)
    assert_refused("has a different cache", side_channel.fetch_metadata, "127.0.0.1", port, 0, own, 5.0)
    assert hash_of(config_of("other", num_gpu_blocks=3)) == HASH


@pytest.mark.parametrize("payload", [b"", b"junk", msgspec.msgpack.encode({"compatibility_hash": HASH})])
def test_an_answer_that_is_none_is_told(payload):
    port = free_port()
    channel = side_channel.NixlSideChannel("127.0.0.1", port, {0: payload}, lambda request_id: True)
    assert_refused("", side_channel.fetch_metadata, "127.0.0.1", port, 0, HASH, 5.0)
    channel.close()


def test_a_taken_port_is_refused_in_one_line(port):
    assert_refused(
        "VLLM_NIXL_SIDE_CHANNEL_PORT", side_channel.NixlSideChannel, "127.0.0.1", port, {}, lambda request_id: True
    )
