"""A relay on this machine that can hold up, lose or change bytes, or cut the connection; for
`disaggregation_faults`.
"""

import contextlib
import re
import socket
import threading

LOST_BYTES = 100


def unchanged(data: bytes, before: int) -> bytes:
    """Pass all data on unchanged."""
    return data


class Wire:
    """A relay of TCP connections from `port` to the port `target`. `up` and `down` take the data of
    each direction and return what to pass on.
    """

    def __init__(self, target: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = self._listener.getsockname()[1], target
        self._open: list[socket.socket] = []
        self.opened = threading.Event()
        self.mend()
        threading.Thread(target=self._accept, daemon=True).start()

    def mend(self) -> None:
        """Close all connections, and pass everything over new ones unchanged."""
        self.up = self.down = unchanged
        self.opened.set()
        while self._open:
            _end(self._open.pop())
        self.opened, self.reached = threading.Event(), threading.Event()

    def fail(self, after: int, kind: str, times: int | None = None) -> None:
        """Fail after `after` downstream bytes of a connection, on the next `times` connections, or
        on each if None.

        `kind` is "hold" (nothing more passes until `opened` is set), "cut" (the connection ends),
        "lose" (some bytes are dropped) or "flip" (one bit changes).
        """
        left = [None] * times if times is not None else None

        def down(data: bytes, before: int) -> bytes:
            if not before <= after < before + len(data) or left == []:
                return data
            if left:
                left.pop()
            self.reached.set()
            return self._spoilt(kind, data)

        self.down = down

    def _spoilt(self, kind: str, data: bytes) -> bytes:
        if kind == "cut":
            raise ConnectionError
        if kind == "lose":
            return data[LOST_BYTES:]
        if kind == "flip":
            return bytes([data[0] ^ 4]) + data[1:]
        self.opened.wait()
        return data

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            try:
                there = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                here.close()
                continue
            self._open += [here, there]
            for source, sink, name in ((here, there, "up"), (there, here, "down")):
                threading.Thread(target=self._relay, args=(source, sink, name), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(getattr(self, name)(data, passed))
                passed += len(data)
        _end(source)
        _end(sink)


class Front(Wire):
    """A relay in front of a prefill server that tells the proxy to fetch keys and values over
    another wire.

    `asked` is set when a request has gone to the server, and `answered` when the server has said
    where its keys and values are.
    """

    def __init__(self, target: int, wire: Wire) -> None:
        self._wire = wire
        super().__init__(target)

    def mend(self) -> None:
        super().mend()
        self.asked, self.answered = threading.Event(), threading.Event()
        self.up, self.down = self._see_question, self._rewrite

    def _see_question(self, data: bytes, before: int) -> bytes:
        if data.startswith(b"POST"):
            self.asked.set()
        return data

    def _rewrite(self, data: bytes, before: int) -> bytes:
        found = re.search(rb'"remote_port":(\d{5})\b', data)
        if found is None:
            return data
        self._wire.target = int(found[1])
        self.answered.set()
        return data[: found.start(1)] + str(self._wire.port).encode() + data[found.end(1) :]


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
