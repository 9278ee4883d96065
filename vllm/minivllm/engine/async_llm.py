"""The engine for an event loop: any number of requests at once, each an async generator of its outputs.

The core runs in a process of its own. One task receives its outputs and hands them to the requests' collectors; a
request whose reader is slow finds its outputs merged there, and holds up nobody else.

In vLLM v0.33.0: `vllm/v1/engine/async_llm.py` (`AsyncLLM`), `RequestOutputCollector` in
`vllm/v1/engine/output_processor.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from minivllm.core.messages import EngineCoreOutputs
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_mp_client import AsyncMPClient
from minivllm.engine.front_end import FrontEnd
from minivllm.errors import EngineDeadError
from minivllm.inputs import Prompt
from minivllm.logger import init_logger
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import RequestOutputKind, SamplingParams

logger = init_logger(__name__)
OUTPUTS_AT_ONCE = 128
"""Outputs that are processed before the event loop's other tasks get a turn."""


class RequestOutputCollector:
    """Between the task that receives outputs and the reader of one request: holds what was not read yet, as one."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._merges = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | Exception | None = None
        self._there = asyncio.Event()

    def put(self, output: RequestOutput | Exception) -> None:
        """Adds an output. Deltas are joined to those that wait; other kinds hold all there is, and replace them."""
        if self._merges and isinstance(output, RequestOutput) and isinstance(self._waiting, RequestOutput):
            self._waiting.add(output)
        else:
            self._waiting = output
        self._there.set()

    async def get(self) -> RequestOutput:
        """Returns what has come since the last call, or waits for it.

        Raises:
            EngineDeadError: the engine has ended.
        """
        await self._there.wait()
        found, self._waiting = self._waiting, None
        self._there.clear()
        if isinstance(found, Exception):
            raise found
        assert found is not None
        return found


class AsyncLLM(FrontEnd):
    """For one event loop. The constructor blocks until the core is ready.

    Raises:
        MinivllmError: the arguments are invalid.
        EngineDeadError: the core died before it was ready.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.engine_core = AsyncMPClient(args)
        super().__init__(args, self.engine_core.ready)
        self._collectors: dict[str, RequestOutputCollector] = {}
        self._handler: asyncio.Task[None] | None = None
        self.dead_error: Exception | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLM":
        """Same as the constructor, under vLLM's name."""
        return cls(engine_args)

    @property
    def errored(self) -> bool:
        """Whether the engine has ended, so that no request can be served any more."""
        return self.dead_error is not None

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a prompt as they come. Whoever stops reading aborts the request.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        collector = self._add(prompt, sampling_params, request_id, priority)
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self._collectors.pop(request_id, None)
            self.abort_now([request_id])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: their readers get a last output with the finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            children = list(self._children.get(one, ()))
            for last in self.output_processor.aborted(children):
                if one in self._collectors:
                    self._collectors[one].put(last)
            self.abort_now([one])

    def abort_now(self, request_ids: Iterable[str]) -> None:
        """Ends requests that nobody reads any more; unknown ids are ignored."""
        children = self._forgotten(request_ids)
        if children and not self.errored:
            self.engine_core.abort_requests(children)

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. Does nothing and returns False while any request holds a block."""
        return await self._utility("reset_prefix_cache")

    async def check_health(self) -> None:
        """Raises `EngineDeadError` if the engine has ended."""
        self._listen()
        if self.dead_error is not None:
            raise self.dead_error

    def shutdown(self) -> None:
        """Ends the core's process. Requests under way fail with `EngineDeadError`."""
        self._die(EngineDeadError("the engine has been shut down"))
        if self._handler is not None and not self._handler.get_loop().is_closed():
            self._handler.cancel()
        self.engine_core.shutdown()

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int) -> RequestOutputCollector:
        self._listen()
        if self.dead_error is not None:
            raise self.dead_error
        text, request = self._processed(request_id, prompt, params, priority)
        collector = self._collectors[request_id] = RequestOutputCollector(params.output_kind)
        for child in self._registered(request_id, text, request):
            self.engine_core.add_request(child)
        return collector

    async def _utility(self, method: str) -> Any:
        self._listen()
        return await self.engine_core.call_utility_async(method)

    def _listen(self) -> None:
        """Starts the task that receives outputs, in the loop that asks first."""
        if self._handler is None:
            self._handler = asyncio.get_running_loop().create_task(self._receive_outputs())

    async def _receive_outputs(self) -> None:
        try:
            while True:
                await self._take_in(await self.engine_core.get_output_async())
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, EngineDeadError):
                logger.exception("The engine's outputs cannot be received any more")
            self._die(error)

    async def _take_in(self, outputs: EngineCoreOutputs) -> None:
        """Hands the outputs of a step to their readers, in chunks, so that a large step does not hold up the loop."""
        shown: list[RequestOutput] = []
        for start in range(0, len(outputs.outputs), OUTPUTS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            some, to_abort = self.output_processor.process_outputs(outputs.outputs[start : start + OUTPUTS_AT_ONCE])
            if to_abort:
                self.engine_core.abort_requests(to_abort)
            for output in some:
                if (collector := self._collectors.get(output.request_id)) is not None:
                    collector.put(output)
            shown += some
        self._finish(shown, outputs)

    def _die(self, error: Exception) -> None:
        """No output will come any more: all readers are told why."""
        if self.dead_error is not None:
            return
        self.dead_error = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        for collector in self._collectors.values():
            collector.put(self.dead_error)
