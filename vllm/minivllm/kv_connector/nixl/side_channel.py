"""NIXL's side channel, from which an engine learns the location of another engine's cache before it
reads from it.

A ZMQ socket of the scheduler's process answers for all ranks: the request is `("get_meta_msg",
pp_rank, tp_rank)` in MessagePack, and the reply is that rank's `NixlHandshakePayload`. The payload
is decoded in two steps, so that incompatible engines find out before they decode data that they
would not understand.

One message is not vLLM's: `("is_held_msg", request_id)` asks whether blocks are still kept. A read
moves whatever is in the memory at that time, and the other side does not notice; only this answer,
given after the last byte was read, confirms that the blocks still belonged to the request.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py`
(`NixlAgentMetadata`, `NixlHandshakePayload`), `base_scheduler.py` (`_nixl_handshake_listener`),
`base_worker.py` (`_nixl_handshake`).
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
GET_META_MSG = b"get_meta_msg"
IS_HELD_MSG = b"is_held_msg"
PROTOCOL = "minivllm 2"
"""Changes with all that two engines must agree on: the messages, the layout of the cache, the
meaning of the params.
"""
MAX_QUESTION_BYTES, MAX_ANSWER_BYTES = 64 << 10, 16 << 20


class NixlAgentMetadata(msgspec.Struct):
    """One rank's cache, as a peer needs to know it.

    The cache is `len(kv_caches_base_addr)` regions of `num_blocks` blocks, one behind the other; a
    block of region i has `block_lens[i]` bytes. `registration_generation` changes whenever memory
    is registered again.
    """

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: int
    block_lens: list[int]
    registration_generation: str


class NixlHandshakePayload(msgspec.Struct):
    """The side channel's answer: decode `agent_metadata_bytes` only if `compatibility_hash` equals
    the engine's own.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes


def compute_nixl_compatibility_hash(layout: Mapping[str, str]) -> str:
    """Return a hash of everything that two engines must have in common; see `layout_of`."""
    return hashlib.sha256(json.dumps([PROTOCOL, layout], sort_keys=True).encode()).hexdigest()


class NixlSideChannel:
    """A server that answers other engines, in its own thread, until it is closed."""

    def __init__(self, host: str, port: int, payloads: Mapping[int, bytes], is_held: Callable[[str], bool]) -> None:
        """Serve these payloads, by tensor-parallel rank, and the answers of `is_held`, which is
        called in the thread.

        Raises:
            MinivllmError: the port is taken, or the host is not an address of this machine.
        """
        self._payloads = payloads
        self._is_held = is_held
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.maxmsgsize = MAX_QUESTION_BYTES
        socket.ipv6 = ":" in host
        try:
            socket.bind(tcp_address(host, port))
        except zmq.ZMQError as error:
            socket.close()
            self._context.term()
            raise MinivllmError(
                f"NIXL's side channel cannot listen on {host}:{port}: {error}; set VLLM_NIXL_SIDE_CHANNEL_HOST and "
                "VLLM_NIXL_SIDE_CHANNEL_PORT; each engine on a machine needs its own port"
            ) from None
        self._thread = threading.Thread(target=self._answer, args=(socket,), daemon=True, name="nixl-side-channel")
        self._thread.start()

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        self._context.term()  # which the thread notices, and closes its socket
        self._thread.join()

    def _answer(self, socket: zmq.Socket) -> None:
        try:
            while True:
                identity, *_, question = socket.recv_multipart()
                socket.send_multipart((identity, b"", self._answer_to(question)))
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close()

    def _answer_to(self, question: bytes) -> bytes:
        """Return the answer to a question; an empty one means that there is none."""
        try:
            match msgspec.msgpack.decode(question):
                case [b"get_meta_msg", 0, int(rank)]:
                    return self._payloads.get(rank, b"")
                case [b"is_held_msg", str(request_id)]:
                    return msgspec.msgpack.encode(self._is_held(request_id))
        except msgspec.MsgspecError:
            pass
        logger.warning("NIXL's side channel received an unknown question")
        return b""


def fetch_metadata(host: str, port: int, rank: int, compatibility_hash: str, seconds: float) -> NixlAgentMetadata:
    """Fetch the metadata of a tensor-parallel rank from the engine at this address.

    Raises:
        MinivllmError: no answer within `seconds`, or the engine there is incompatible with this one;
            the message says why.
    """
    answer = _ask(host, port, (GET_META_MSG, 0, rank), seconds)
    where = f"the engine at {host}:{port}"
    if not answer:
        raise MinivllmError(f"{where} has no rank {rank}")
    try:
        payload = msgspec.msgpack.decode(answer, type=NixlHandshakePayload)
        if payload.compatibility_hash != compatibility_hash:
            raise MinivllmError(
                f"{where} has a different cache; both engines need the same model, dtype, kv_cache_dtype, block_size, "
                "tensor_parallel_size and version of minivllm"
            )
        return msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
    except msgspec.MsgspecError as error:
        raise MinivllmError(f"{where} sent something other than NIXL metadata: {error}") from None


def ask_is_held(host: str, port: int, request_id: str, seconds: float) -> bool:
    """Return whether the engine at this address still keeps this request's blocks.

    Raises:
        MinivllmError: no answer within `seconds`.
    """
    return _ask(host, port, (IS_HELD_MSG, request_id), seconds) == msgspec.msgpack.encode(True)


def _ask(host: str, port: int, question: tuple[Any, ...], seconds: float) -> bytes:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.maxmsgsize = MAX_ANSWER_BYTES
        socket.ipv6 = ":" in host
        socket.sndtimeo = socket.rcvtimeo = int(seconds * 1000)
        try:
            socket.connect(tcp_address(host, port))
            socket.send(msgspec.msgpack.encode(question))
            return socket.recv()
        except zmq.Again:
            raise MinivllmError(f"the engine at {host}:{port} did not answer within {seconds:g} s") from None
        except (zmq.ZMQError, ValueError) as error:
            raise MinivllmError(f"the engine at {host}:{port} cannot be reached: {error}") from None


def tcp_address(host: str, port: int) -> str:
    """Return the ZMQ address of a TCP socket."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
