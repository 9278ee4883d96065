"""Where else a core can run, to measure against a process of its own: in the event loop, or in a thread beside it.

Both have the methods of lesson 06's `CoreInProcess`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutput, EngineCoreOutputs
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.outputs import CompletionOutput, RequestOutput

BusyLoop = Callable[[EngineCore, SimpleQueue, Callable[[EngineCoreOutputs], object]], None]


class CoreInLoop:
    """The core is an object, and each step stops the event loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.core = EngineCore(EngineArgs(**settings))
        self.asked = asyncio.Event()

    async def open(self) -> None:
        """Nothing to wait for."""

    def send(self, act: str, argument: Any) -> None:
        """A request to "add", or ids to "abort"."""
        self.core.add_request(argument) if act == "add" else self.core.abort_requests(argument)
        self.asked.set()

    async def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step, which runs here; all other tasks get one turn before it."""
        await asyncio.sleep(0)
        while not self.core.has_unfinished_requests():
            self.asked.clear()
            await self.asked.wait()
        return self.core.step()

    def close(self) -> None:
        """Nothing to end."""


class CoreInThread:
    """A thread steps. Kernels let other threads run meanwhile; Python code does not."""

    def __init__(self, settings: dict[str, Any], busy_loop: BusyLoop) -> None:
        self.core, self.busy_loop = EngineCore(EngineArgs(**settings)), busy_loop
        self.inbox, self.outputs = SimpleQueue(), asyncio.Queue()

    async def open(self) -> None:
        """Starts the thread."""
        put = partial(asyncio.get_running_loop().call_soon_threadsafe, self.outputs.put_nowait)
        threading.Thread(target=self.busy_loop, args=(self.core, self.inbox, put), daemon=True).start()

    def send(self, act: str, argument: Any) -> None:
        """A request to "add", or ids to "abort"."""
        self.inbox.put((act, argument))

    async def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step, whenever there is one."""
        return await self.outputs.get()

    def close(self) -> None:
        """The thread ends once it is idle."""
        self.inbox.put(None)


def delta_of(output: EngineCoreOutput, detokenizer: IncrementalDetokenizer) -> RequestOutput:
    """What a step has added to a request: its tokens, and the text that they make."""
    before = len(detokenizer.text)
    detokenizer.update(output.new_token_ids)
    if output.finish_reason:
        detokenizer.finish()
    text = detokenizer.text[before:]
    one = CompletionOutput(0, text, output.new_token_ids, finish_reason=output.finish_reason)
    return RequestOutput(output.request_id, None, [], None, [one], finished=output.finish_reason is not None)
