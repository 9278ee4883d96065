"""The adapters that a server has by name; of several API servers, that all of them have.

One API server keeps them in memory. Several share a file in the folder of their sockets, which only this user can read:
a server that changes it holds a lock, and puts a new file in its place before its client is answered; the others look
before they use a name whether there is a new one. So whoever has been told that an adapter is loaded, or gone, finds it
so on every server.

In vLLM v0.33.0 each API server has adapters of its own, and those that come at run time are refused where there are
several (`vllm/entrypoints/cli/serve.py`).
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from minivllm.core.lora_request import LoRARequest
from minivllm.engine.wire import decode, encode
from minivllm.entrypoints.openai.errors import RequestError, failed
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_BETWEEN_TRIES = 0.02
"""How often a server that wants to change the adapters looks whether another one has ended doing so."""


@dataclass
class Adapters:
    """What requests name, and the path of each adapter as it was given. Ids are never used twice."""

    by_name: dict[str, LoRARequest] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    last_id: int = 0

    def next_id(self) -> int:
        """Return an id that no adapter has had."""
        self.last_id += 1
        return self.last_id

    def put(self, adapter: LoRARequest, root: str) -> None:
        """Have requests find this adapter by its name."""
        self.by_name[adapter.lora_name], self.roots[adapter.lora_name] = adapter, root

    def pop(self, name: str) -> LoRARequest | None:
        """Have no request find an adapter of this name; return the one that had it."""
        self.roots.pop(name, None)
        return self.by_name.pop(name, None)


class AdapterTable:
    """One server's view of the adapters, which is always the present one."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file that several servers share; it need not be there yet."""
        self._path = path
        self._adapters = Adapters()
        self._read: BinaryIO | None = None
        """What they were read from. While that is open, no file that takes its place has its inode number."""
        self._lock = asyncio.Lock()

    def now(self) -> Adapters:
        """Return the adapters of now, to be read."""
        if self._path is not None:
            self._look(self._path)
        return self._adapters

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[Adapters]:
        """Yield the adapters to be changed, while no other server does. At the end all servers have the change.

        Raises:
            RequestError: the change cannot be written; then no server has it.
        """
        async with self._lock:
            if self._path is None:
                yield self._adapters
                return
            with _opened(self._path.with_suffix(".lock")) as lock:  # a server that dies gives it back
                while not _taken(lock.fileno()):
                    await asyncio.sleep(SECONDS_BETWEEN_TRIES)
                try:
                    yield self.now()
                finally:
                    self._write(self._path)

    def _look(self, path: Path) -> None:
        """Reads the file, unless it is the one that was read last. A damaged one changes nothing."""
        try:
            if self._read is not None and os.path.samestat(path.stat(), os.fstat(self._read.fileno())):
                return
            found = path.open("rb")
        except FileNotFoundError:
            return  # nobody has changed anything yet
        self._close()
        self._read = found
        try:
            self._adapters = decode(found.read(), Adapters)
        except msgspec.DecodeError as error:
            logger.error("%s is damaged (%s): adapters stay as they were, until one is loaded or unloaded", path, error)

    def _write(self, path: Path) -> None:
        written = path.with_suffix(".new")
        try:
            written.write_bytes(encode(self._adapters))
            os.replace(written, path)
        except OSError as error:
            self._close()
            self._adapters = Adapters()  # what the others have is read again
            raise _cannot(error) from None

    def _close(self) -> None:
        if self._read is not None:
            self._read.close()
            self._read = None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise _cannot(error) from None


def _cannot(error: OSError) -> RequestError:
    return failed(f"the adapters of all API servers stay as they are, since they cannot be written: {error.strerror}")


def _taken(lock: int) -> bool:
    import fcntl  # there is none on Windows

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
