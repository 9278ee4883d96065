"""The event loop's client of a core in a thread of this process, which `Parts` of the core require.

The kernels release the GIL while they compute; Python code does not, so the event loop waits while
the scheduler runs.
"""

import asyncio
import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.busy_loop import Act, abort_requests, answer_of, run_busy_loop, tell_watchers
from minivllm.engine.core import EngineCore
from minivllm.engine.core_client import EngineCoreClient, joined_answers
from minivllm.errors import EngineDeadError, WorkerDiedError
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_LEAVE = 10.0


class AsyncThreadClient(EngineCoreClient):
    """A client for `AsyncLLM`. The first call for outputs starts the thread, in that caller's event
    loop.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.engine_core = EngineCore(args)
        self.engines = [self.engine_core.ready]
        self._to_do: queue.SimpleQueue[Act | Exception | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        # Started with the first call for outputs: only then is there a loop to send them to.
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine core")

    def add_request(self, request: EngineCoreRequest) -> None:
        self._to_do.put(partial(self.engine_core.add_request, request))

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; outputs already on their way still arrive, and the caller must ignore
        them.
        """
        self._to_do.put(partial(abort_requests, self.engine_core, list(request_ids), self._send))

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for the outputs of the next step, and return them.

        Raises:
            EngineDeadError: the thread has ended.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()
        outputs = await self._outputs.get()
        if outputs is None:
            raise EngineDeadError("the engine's core has ended")
        return outputs

    async def call_utility_async(self, method: str, *arguments: Any) -> Any:
        """Call a method of the core by name and return its result.

        Raises:
            MinivllmError: the arguments are invalid.
            RuntimeError: the method failed.
        """
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[UtilityOutput] = loop.create_future()

        def call() -> None:
            answer = answer_of(self.engine_core, 0, method, arguments)
            tell_watchers(self.engine_core, self._send)
            loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(answer))  # who asked may have left

        self._to_do.put(call)
        return joined_answers(method, [await answered])

    def seconds_silent(self) -> float:
        """Return 0: a core in this process is as alive as its caller."""
        return 0.0

    def shutdown(self) -> None:
        """Stop the thread after the current step, and shut the core down."""
        self._to_do.put(None)
        if self._thread.is_alive():
            self._thread.join(SECONDS_TO_LEAVE)
        self.engine_core.shutdown()

    def _run(self) -> None:
        try:
            run_busy_loop(self.engine_core, self._to_do, self._send)
        except WorkerDiedError as error:
            logger.error("The engine's core has ended: %s", error)
        finally:
            self._send(None)

    def _send(self, outputs: EngineCoreOutputs | None) -> None:
        assert self._loop is not None
        # At the end of the program the loop may be gone before the thread.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, outputs)
