"""The three places where a lesson's core can run: the event loop, a thread beside it, and a process
of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutputs
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.socket_messages import decode, encode

BusyLoop = Callable[[EngineCore, SimpleQueue, Callable[[EngineCoreOutputs], object]], None]


class CoreInLoop:
    """A core that is an object in the event loop, which each step blocks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.core = EngineCore(EngineArgs(**settings))
        self.called = asyncio.Event()

    async def open(self) -> None:
        """Do nothing: the core is ready."""

    def send(self, act: str, argument: Any) -> None:
        """Call the core with a request to "add", or with ids to "abort"."""
        self.core.add_request(argument) if act == "add" else self.core.abort_requests(argument)
        self.called.set()

    async def get_output(self) -> EngineCoreOutputs:
        """Return the outputs of the next step, which runs in this loop once every other task has
        had a turn.
        """
        await asyncio.sleep(0)
        while not self.core.has_unfinished_requests():
            self.called.clear()
            await self.called.wait()
        return self.core.step()

    def close(self) -> None:
        """Do nothing: there is nothing to shut down."""


class CoreInThread:
    """A core whose steps run in a thread. Kernels let other threads run meanwhile; Python code does
    not.
    """

    def __init__(self, settings: dict[str, Any], busy_loop: BusyLoop) -> None:
        self.core, self.busy_loop = EngineCore(EngineArgs(**settings)), busy_loop
        self.inbox, self.outputs = SimpleQueue(), asyncio.Queue()

    async def open(self) -> None:
        """Start the thread."""
        put = partial(asyncio.get_running_loop().call_soon_threadsafe, self.outputs.put_nowait)
        threading.Thread(target=self.busy_loop, args=(self.core, self.inbox, put), daemon=True).start()

    def send(self, act: str, argument: Any) -> None:
        """Put a request to "add", or ids to "abort", into the thread's inbox."""
        self.inbox.put((act, argument))

    async def get_output(self) -> EngineCoreOutputs:
        """Return the outputs of the next step, waiting until there is one."""
        return await self.outputs.get()

    def close(self) -> None:
        """Let the thread end once it is idle."""
        self.inbox.put(None)


class CoreInProcess:
    """The event loop's end of a socket to `serve_core` in `script`; both ends frame messages by
    their length.

    Plain data crosses the socket as MessagePack, never as pickle.
    """

    def __init__(self, settings: dict[str, Any], script: str) -> None:
        self.socket, core_socket = socket.socketpair()
        code = f"from minivllm_lab.exercise import load; load({script!r}).serve_core({core_socket.fileno()})"
        command = [sys.executable, "-c", code, json.dumps(settings)]
        self.process = subprocess.Popen(command, pass_fds=[core_socket.fileno()])
        core_socket.close()

    async def open(self) -> None:
        """Wait until the core is ready."""
        self.reader, self.writer = await asyncio.open_connection(sock=self.socket)
        await self.reader.readexactly(4)

    def send(self, act: str, argument: Any) -> None:
        """Send a request to "add", or ids to "abort", without waiting, since the transport buffers."""
        message = act.encode().ljust(5) + encode(argument)
        self.writer.write(len(message).to_bytes(4, "big") + message)

    async def get_output(self) -> EngineCoreOutputs:
        """Return the outputs of the next step, waiting until there is one."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return decode(await self.reader.readexactly(size), EngineCoreOutputs)

    def close(self) -> None:
        """End the core by closing its socket."""
        self.writer.close()


def cores(settings: dict[str, Any], script: str, busy_loop: BusyLoop) -> dict[str, Any]:
    """Make a core in each of the three places, with the lesson's busy loop; `script` is the
    lesson's file.
    """
    here = {"the event loop": CoreInLoop(settings), "a thread": CoreInThread(settings, busy_loop)}
    return {**here, "a process": CoreInProcess(settings, script)}
