"""Encode the messages on the sockets between a front end and a core's process.

A message is a one-byte kind and a payload: plain data in MessagePack, never pickle, which would
execute whatever code it receives.

In vLLM v0.33.0: `vllm/v1/serial_utils.py` (`MsgpackEncoder`, `MsgpackDecoder`),
`EngineCoreRequestType` in `vllm/v1/engine/__init__.py`.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from minivllm.errors import EngineDeadError, MinivllmError, UnsupportedModelError, WorkerDiedError

Message = TypeVar("Message")


def identity(rank: int) -> bytes:
    """Return a core's identity on ROUTER sockets."""
    return b"core %d" % rank


class Kind:
    """Kinds of messages. A core sends HELLO and gets the engine's arguments, then sends READY,
    OUTPUTS, and FAILED as its last message. The other kinds are sent to the core, which answers a
    PING with another one.
    """

    HELLO, READY, OUTPUTS, FAILED = b"h", b"r", b"o", b"f"
    ADD, ABORT, UTILITY, PING = b"a", b"x", b"u", b"p"


@dataclass
class Failure:
    """The reason why a core failed to start or died: the class name of an exception, and its
    message.
    """

    name: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Wrap this exception in a `Failure`."""
        return cls(type(error).__name__, str(error))

    def error(self) -> Exception:
        """Return the exception for the caller: the core's own if the user can act on it, else
        `EngineDeadError`.
        """
        known = (MinivllmError, UnsupportedModelError, WorkerDiedError)
        kind = {error_class.__name__: error_class for error_class in known}.get(self.name)
        return kind(self.text) if kind else EngineDeadError(f"the engine's core has ended: {self.name}: {self.text}")


def encode(message: Any) -> bytes:
    """Encode a dataclass or builtins as bytes. Paths become strings."""
    return _encoder.encode(message)


def decode(payload: bytes, kind: type[Message]) -> Message:
    """Decode a message of this type. Raise `msgspec.ValidationError` if the bytes do not match it."""
    return msgspec.msgpack.decode(payload, type=kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | Set):  # a range of token ids
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot cross to another process: {value!r}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
