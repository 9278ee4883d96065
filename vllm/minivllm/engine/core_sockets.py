"""The sockets between cores and their clients, in a folder of this machine or on TCP ports.

In a folder that only this user can read, nobody else can connect. On TCP everybody can, so messages
are encrypted (CURVE). The front end makes a key pair when it starts, and keeps even the "public"
key secret: Ray brings it to the cores. A handshake never sends that key, and cannot begin without
it, so only the cores can connect.

In vLLM v0.33.0: `EngineZmqAddresses` in `vllm/v1/engine/utils.py`; its TCP sockets are open to all.
"""

from dataclasses import dataclass, field

import zmq


@dataclass(frozen=True)
class FolderSockets:
    """Sockets in a folder of this machine."""

    folder: str

    def connect(self, socket: zmq.Socket, name: str) -> None:
        """Connect a core's socket to the front end's socket of this name."""
        socket.connect(f"ipc://{self.folder}/{name}")


@dataclass(frozen=True)
class TcpSockets:
    """Addresses by name, and the front end's key: all that a core on another machine needs to know.

    Any process that has this can talk to the engine.
    """

    server_key: bytes = field(repr=False)
    addresses: dict[str, str] = field(default_factory=dict)

    def connect(self, socket: zmq.Socket, name: str) -> None:
        socket.curve_serverkey = self.server_key
        # A key pair of its own for each socket: the server checks nobody's identity, only that they
        # know its key.
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(self.addresses[name])


CoreSockets = FolderSockets | TcpSockets
"""What a core connects its sockets by."""


class OwnSockets:
    """All sockets of one side, which are closed together.

    pyzmq's context has only weak references to its sockets. When the garbage collector takes both,
    the sockets are gone before a finalizer runs, and the context would wait for sockets that nobody
    can close any more.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def new(self, kind: int) -> zmq.Socket:
        """Return a socket without a high-water mark: it queues any number of messages and drops
        none.
        """
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        # High-water marks of 0 mean none; by default ZeroMQ drops what exceeds a thousand messages.
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
        return socket

    def bind_in_folder(self, kind: int, folder: str, name: str) -> zmq.Socket:
        """Return a socket in the folder."""
        socket = self.new(kind)
        socket.bind(f"ipc://{folder}/{name}")
        return socket

    def close(self) -> None:
        """Close all of them; messages that were not sent are lost. A second call does nothing."""
        while self._sockets:
            self._sockets.pop().close(linger=0)
        self._context.term()


class TcpServer:
    """A server that binds sockets on one interface of this machine, for the cores that hold
    `for_cores`.
    """

    def __init__(self, sockets: OwnSockets, host: str) -> None:
        server_key, self._secret_key = zmq.curve_keypair()
        self.for_cores = TcpSockets(server_key)
        self._sockets = sockets
        self._host = host

    def bind(self, kind: int, name: str) -> zmq.Socket:
        """Return a socket on a free port; cores find it by its name."""
        socket = self._sockets.new(kind)
        socket.curve_secretkey = self._secret_key
        socket.curve_server = True
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        self.for_cores.addresses[name] = f"tcp://{self._host}:{port}"
        return socket
